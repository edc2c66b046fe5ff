// A page that tries to get out: all the ways there are to a server (whose address is `http`, whose datagrams
// come in at `udp`) and to files outside its folder (`files`: their addresses, each holding TOPSECRET).
// Gives what it got: a list of "way: what". Called by tests/test_untrusted.py and tests/test_web.py.
async ({ http, udp, files }) => {
  const got = [], wait = (ms) => new Promise((done) => setTimeout(done, ms));
  addEventListener("message", ({ data }) => got.push(`message: ${data}`));
  const attempt = (name, way) => Promise.race([wait(1500), (async () => {
    try { got.push(`${name}: ${await way()}`); } catch (error) { /* that is as it should be */ }
  })()]);
  const event = (target, good, bad = "error") => new Promise((done, fail) => {
    target[`on${good}`] = ({ data }) => done(data ?? good);
    target[`on${bad}`] = fail;
  });
  const element = (tag, set) => {
    const node = Object.assign(document.createElement(tag), set);
    const loaded = event(node, "load");
    document.body.append(node);
    return loaded.then(() => `${node.contentDocument?.body?.innerText ?? tag}`);
  };
  const get = (url) => new Promise((done, fail) => {
    const request = new XMLHttpRequest();
    request.open("GET", url);
    request.onload = () => done(`${request.status} ${request.responseText}`);
    request.onerror = fail;
    request.send();
  });
  const code = (url, post) => URL.createObjectURL(new Blob([`try { const x = new XMLHttpRequest();
    x.open("GET", "${url}", false); x.send(); ${post}(x.responseText) } catch { ${post}("") }`]));
  const shared = (url) => {
    const source = `onconnect = ({ ports: [port] }) => { const post = (text) => port.postMessage(text);
      importScripts("${code(url, "post")}"); }`;
    return event(new SharedWorker(URL.createObjectURL(new Blob([source]))).port, "message");
  };
  const link = (url, set) => Object.assign(document.createElement("a"), { href: url, ...set }).click();
  const send = (url) => {
    const form = document.createElement("form");
    Object.assign(form, { action: url, method: "post", target: "_blank" });
    document.body.append(form);
    form.submit();
  };
  const frame = () => document.body.appendChild(document.createElement("iframe")).contentWindow;
  const ways = {
    fetch: async (url) => (await fetch(url)).text(),
    "fetch without cors": async (url) => (await fetch(url, { mode: "no-cors" })).type,
    request: get,
    worker: (url) => event(new Worker(code(url, "postMessage")), "message"),
    "worker of a frame": (url) => event(new (frame().Worker)(code(url, "postMessage")), "message"),
    "shared worker": shared,
    module: (url) => import(url),
    events: (url) => event(new EventSource(url), "open"),
    image: (url) => element("img", { src: url }),
    script: (url) => element("script", { src: url }),
    style: (url) => element("link", { rel: "stylesheet", href: url }),
    preload: (url) => element("link", { rel: "preload", as: "fetch", href: url }),
    prefetch: (url) => element("link", { rel: "prefetch", href: url }),
    frame: (url) => element("iframe", { src: url }).then((text) => text.match(/TOPSECRET/)),
    object: (url) => element("object", { data: url }).then((text) => text.match(/TOPSECRET/)),
    "script of a frame": (url) => element("iframe", { srcdoc: `<script src="${url}"></` + "script>" })
      .then((text) => text.match(/TOPSECRET/)),
    "others' window": (url) => { open(url); frame().open(url); return ""; },
    form: (url) => { send(url); return ""; },
    "new tab": (url) => { link(url, { target: "_blank" }); return ""; },
    beacon: (url) => { navigator.sendBeacon(url, "x"); return ""; },
    ping: (url) => { link("#", { ping: url }); return ""; },
  };
  const attempts = [http, ...files].flatMap((url) =>
    Object.entries(ways).map(([name, way]) => attempt(name, () => way(url))));
  for (const scheme of ["ws", "wss"]) {
    attempts.push(attempt(scheme, () => event(new WebSocket(http.replace("http", scheme)), "open")));
  }
  const tcp = new URL(http).port;
  for (const way of [`stun:127.0.0.1:${udp}`, `turn:127.0.0.1:${udp}`,
    `turn:127.0.0.1:${tcp}?transport=tcp`]) {
    attempts.push(attempt("call", async () => {
      const call = new RTCPeerConnection({ iceServers: [{ urls: way, username: "a", credential: "b" }] });
      call.createDataChannel("x");
      await call.setLocalDescription(await call.createOffer());
      await wait(1000);
    }));
  }
  attempts.push(attempt("transport", () => new WebTransport(http.replace("http:", "https:")).ready));
  attempts.push(attempt("service worker", () => navigator.serviceWorker.register(`${http}worker.js`)));
  for (const rel of ["preconnect", "dns-prefetch", "prerender"]) element("link", { rel, href: http });
  await Promise.all(attempts);
  await wait(500);
  return [...got, `window: ${window.stolen}`].filter((line) => !/: (undefined|null|opaque|)$/.test(line));
}
