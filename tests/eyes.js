// What a person sees of a page, judged by its pixels: whatever changes none when it is hidden is not seen.
// For test_sight.py, which gives it `shoot`, a screenshot. Shares no code with what it judges.
window.eyes ??= (() => {
  "use strict";
  const MOUSE = /^(click|dblclick|mousedown|mouseup|pointerdown|pointerup)$/;
  const NOT_THE_TASK = "script, style, title, head, #reward-display, #sync-task-cover, #click-canvas";
  const CONTROL = "a, button, input, select, textarea, summary, [contenteditable=true], [draggable=true]";
  const root = document.scrollingElement;

  // ---- pixels ----

  const picture = async () => {
    const bytes = Uint8Array.from(atob(await shoot()), (letter) => letter.charCodeAt(0));
    const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const brush = new OffscreenCanvas(innerWidth, innerHeight).getContext("2d");
    brush.drawImage(image, 0, 0);
    return new Uint32Array(brush.getImageData(0, 0, innerWidth, innerHeight).data.buffer);
  };
  const same = (one, other) => one.every((pixel, index) => pixel === other[index]);
  const still = async () => { // what was just scrolled may change once more under the mouse
    let last = await picture();
    for (let next; !same(last, next = await picture());) last = next;
    return last;
  };
  const count = (boxes, test) => { // how many pixels of the boxes pass the test, and how many there are
    let passed = 0, all = 0;
    for (const { left, top, right, bottom } of boxes) {
      all += (right - left) * (bottom - top);
      for (let y = Math.max(Math.floor(top), 0); y < Math.min(bottom, innerHeight); y++) {
        for (let x = Math.max(Math.floor(left), 0); x < Math.min(right, innerWidth); x++) {
          passed += test(y * innerWidth + x);
        }
      }
    }
    return [passed, all];
  };
  const boxes = (node) => {
    if (node.nodeType !== Node.TEXT_NODE) return [node.getBoundingClientRect()];
    const range = document.createRange();
    range.selectNodeContents(node);
    return [...range.getClientRects()].filter(({ width, height }) => width > 0 && height > 0);
  };
  const changed = (node, one, other) => count(boxes(node), (pixel) => one[pixel] !== other[pixel])[0] > 0;
  const styled = async (css) => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(css);
    document.adoptedStyleSheets.push(sheet);
    const seen = await picture();
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((other) => other !== sheet);
    return seen;
  };

  // ---- elements: hidden in rounds, so that no two of a round overlap ----

  const meet = (one, other) => one.left < other.right && other.left < one.right &&
    one.top < other.bottom && other.top < one.bottom;
  const elementsSeen = async (nodes) => {
    const before = await still(), seen = new Map();
    for (let left = [...nodes]; left.length;) {
      const round = left.filter((node, index) =>
        !left.slice(0, index).some((other) => meet(boxes(node)[0], boxes(other)[0])));
      const hiding = round.map((node) => node.animate({ opacity: [0, 0] }, 1e9)); // leaves the document alone
      const after = await picture();
      hiding.forEach((each) => each.cancel());
      round.filter((node) => changed(node, before, after)).forEach((node) => seen.set(node, 1));
      left = left.filter((node) => !round.includes(node));
    }
    return seen;
  };

  // ---- texts: each marked by a colour of its own, and emptied of ink ----

  const marked = async (texts) => {
    const shades = texts.map((_, index) => [3 + (index % 250), 77, 251 - Math.floor(index / 250)]);
    texts.forEach((text, index) => {
      const range = document.createRange();
      range.selectNodeContents(text);
      CSS.highlights.set(`eyes-${index}`, new Highlight(range));
    });
    const seen = await styled(shades.map((shade, index) =>
      `::highlight(eyes-${index}) { background-color: rgb(${shade}) }`).join("\n"));
    CSS.highlights.clear();
    return [seen, shades.map(([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0)];
  };
  const textsSeen = async (texts) => { // text -> the share of its area that is seen
    const before = await still(), shares = new Map();
    const bare = await styled(`* { -webkit-text-fill-color: transparent !important; }
      text { fill: none !important; stroke: none !important; }`);
    const inked = texts.filter((text) => changed(text, before, bare));
    const plain = inked.filter((text) => !text.parentElement.closest("svg"));
    const [seen, shades] = await marked(plain);
    for (const [index, text] of plain.entries()) {
      let [share, all] = count(boxes(text), (pixel) => seen[pixel] === shades[index]);
      if (!share) { // blended with what lies beneath
        const [alone] = await marked([text]);
        [share] = count(boxes(text), (pixel) => alone[pixel] !== before[pixel]);
      }
      if (share) shares.set(text, share / all);
    }
    const drawn = inked.filter((text) => text.parentElement.closest("svg"));
    const shown = await elementsSeen(new Set(drawn.map(({ parentElement }) => parentElement)));
    drawn.filter((text) => shown.has(text.parentElement)).forEach((text) => shares.set(text, 1));
    return shares;
  };

  // ---- what a person could scroll to ----

  const places = () => [root, ...document.querySelectorAll("*")]
    .map((node) => [node, node.scrollLeft, node.scrollTop]);
  const moved = (saved) => saved
    .filter(([node, left, top]) => node.scrollLeft !== left || node.scrollTop !== top);
  const restore = (saved) => moved(saved)
    .forEach(([node, left, top]) => node.scrollTo({ left, top, behavior: "instant" }));
  const bring = (node) => {
    for (let above = node.parentElement; above; above = above.parentElement) {
      if (above !== root && !/auto|scroll/.test(getComputedStyle(above).overflow)) continue;
      const [box] = boxes(node);
      const { left, top } = above === root ? new DOMRect() : above.getBoundingClientRect();
      above.scrollLeft += box.left + box.width / 2 - left - above.clientWidth / 2;
      above.scrollTop += box.top + box.height / 2 - top - above.clientHeight / 2;
    }
  };
  const andScrolledTo = async (all, look) => {
    const seen = await look(all), saved = places();
    for (const node of all) {
      if (seen.has(node) || !node.isConnected || !boxes(node).length) continue;
      bring(node);
      if (moved(saved).length) {
        (await look(all.filter((other) => !seen.has(other)))).forEach((share, each) => seen.set(each, share));
        restore(saved);
      }
    }
    return seen;
  };

  // ---- who hears the mouse, as the debugger says ----

  const heard = new Map();
  const hear = (node, listeners) =>
    heard.set(node, Object.keys(listeners).filter((type) => MOUSE.test(type)));
  const handlers = (node) => Object.entries(window.jQuery?._data(node, "events") ?? {})
    .filter(([type]) => MOUSE.test(type)).flatMap(([, each]) => [...each]);
  const usable = () => {
    const found = new Set(document.body.querySelectorAll(CONTROL));
    for (const [node, types] of heard) {
      if (!node.isConnected || node.matches("html, body, #wrap, #area")) continue;
      const given = handlers(node), served = given.filter(({ selector }) => selector);
      // jQuery's own listener may hear for others only: for what lies in the node and matches
      if (types.length && !(served.length && served.length === given.length)) found.add(node);
      for (const { selector } of served) jQuery(node).find(selector).each((_, each) => { found.add(each); });
      if (getComputedStyle(node).cursor === "pointer" && !node.closest("label") &&
        getComputedStyle(node.parentElement).cursor !== "pointer") found.add(node);
    }
    return [...found].filter((node) => !node.closest(`${NOT_THE_TASK}, #query`) && node.type !== "hidden");
  };

  const reached = (node) => { // whether the mouse meets it or what is in it, at any of a grid of points
    const { left, top, width, height } = boxes(node)[0];
    for (let x = left + 1; x < left + width; x += 3) {
      for (let y = top + 1; y < top + height; y += 3) {
        if (node.contains(document.elementFromPoint(x, y))) return true;
      }
    }
    return false;
  };

  // What is wrong with the references that are listed, and all texts, each with the share of it that is seen.
  const judge = async (nodes, refs) => {
    const listed = refs.map((ref) => nodes[ref]);
    const shown = await andScrolledTo(listed, elementsSeen);
    const unlisted = usable().filter((node) => !listed.includes(node) && reached(node));
    const saved = places(), caught = new Set();
    for (const ref of unlisted.length ? refs : []) { // what lies under the mouse when that is clicked
      const { x, y, error } = mini.locate(ref);
      if (error) continue;
      for (const under of document.elementsFromPoint(x, y)) caught.add(under);
      for (let above = nodes[ref]; above; above = above.parentElement) caught.add(above); // they hear of it
    }
    restore(saved);
    const missed = unlisted.filter((node) => !caught.has(node));
    const open = await andScrolledTo(missed, elementsSeen);
    const pictures = [...document.images].filter(({ alt }) => alt);
    const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode, { parentElement } = text;
      if (text.data.trim() && !parentElement.closest(`${NOT_THE_TASK}, textarea, select`)) texts.push(text);
    }
    const shares = new Map([...await andScrolledTo(texts, textsSeen),
      ...await andScrolledTo(pictures, elementsSeen)]);
    const order = (one, other) =>
      one.compareDocumentPosition(other) & Node.DOCUMENT_POSITION_PRECEDING ? 1 : -1;
    return {
      unseen: refs.filter((ref) => !shown.has(nodes[ref])),
      missed: missed.filter((node) => open.has(node))
        .map(({ outerHTML }) => outerHTML.replace(/\s+/g, " ").slice(0, 100)),
      texts: [...texts, ...pictures].sort(order).map((each) => ({
        words: each.data ?? each.alt, share: shares.get(each) ?? 0,
        asked: (each.parentElement.closest("#query") ?? null) !== null,
      })),
    };
  };

  // ---- what arrives at an element when something is done to it ----

  let target = null, events = [];
  const expect = (node) => { target = node; events = []; };
  for (const type of ["mousedown", "mousemove", "wheel", "keydown", "input"]) {
    addEventListener(type, ({ isTrusted, target: met }) => {
      events.push({ type, isTrusted, met: target?.contains(met) ?? false });
    }, { capture: true, passive: true });
  }
  return { hear, judge, expect, events: () => events };
})();
