// The page as a person sees it, one element a line, and where to put the mouse. Runs after episode.js.
window.mini = (() => {
  "use strict";
  const MOUSE = ["click", "dblclick", "mousedown", "mouseup", "pointerdown"];
  const KEYS = ["keydown", "keypress", "keyup"];
  const FIELD = "input, select, textarea", BUTTON = /^(button|submit|reset|image)$/;
  const NOT_TYPED = /^(button|submit|reset|image|checkbox|radio|color|file|range)$/;
  const IN_PARTS = /^(date|time|month|week|datetime-local)$/;
  const UNSEEN = "script, style, noscript, template, #reward-display, #sync-task-cover, #click-canvas, #query";
  const USABLE = `a, button, ${FIELD}, [onclick], [onmousedown], [contenteditable=true], [tabindex='0'],
    .ui-sortable > *, .ui-droppable`;
  const SHAPE = "svg circle, svg ellipse, svg line, svg path, svg polygon, svg polyline, svg rect, svg text";
  const COLORS = {
    "#000000": "black", "#ffffff": "white", "#808080": "grey", "#ff0000": "red", "#008000": "green",
    "#0000ff": "blue", "#ffff00": "yellow", "#00ffff": "aqua", "#ff00ff": "magenta", "#00ff00": "lime",
    "#800080": "purple", "#ffa500": "orange", "#ffc0cb": "pink", "#808000": "olive",
  };
  const MAX_NAME = 300, MAX_VALUE = 2000, MAX_OPTIONS = 40, MAX_TEXT = 6000;

  // A reference belongs to a node for its life and is never given twice in an episode.
  let nodes = [null], refs = new Map();

  // ---- what is seen ----

  // Where the mouse would meet the node itself; null if it is covered, clipped or scrolled away.
  const SPOTS = [[0.5, 0.5], [0.25, 0.5], [0.75, 0.5], [0.5, 0.2], [0.5, 0.8], [0.1, 0.1], [0.9, 0.9]];
  const spot = (node) => {
    for (const box of node.getClientRects()) {
      for (const [right, down] of SPOTS) {
        // the first part of a date stands at the left
        const x = box.left + (IN_PARTS.test(node.type) ? 8 : right * box.width), y = box.top + down * box.height;
        if (node.contains(document.elementFromPoint(x, y))) return { x, y };
      }
    }
    return null;
  };
  // Out of sight only because something was scrolled: the innermost box that cuts it off can be scrolled back.
  const scrolled = (node, box) => {
    const x = box.left + box.width / 2, y = box.top + box.height / 2;
    for (let above = node.parentElement; above && above !== document.body; above = above.parentElement) {
      const { overflow } = getComputedStyle(above), cut = above.getBoundingClientRect();
      if (overflow === "visible" || (x >= cut.left && x <= cut.right && y >= cut.top && y <= cut.bottom)) continue;
      return /auto|scroll/.test(overflow);
    }
    return x > innerWidth || y > innerHeight || y < 0;
  };
  const styled = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const seen = (node) => {
    const box = node.getBoundingClientRect();
    return box.width + box.height > 0 && styled(node) && (spot(node) !== null || scrolled(node, box));
  };
  const range = document.createRange();
  const readable = (text) => {
    range.selectNode(text);
    const box = [...range.getClientRects()].find(({ width, height }) => width > 0 && height > 0);
    if (!box || !styled(text.parentElement)) return false;
    const hit = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    return text.parentElement.contains(hit) || scrolled(text, box);
  };
  const block = (node) => { // a bare block of colour, as the ones to be counted
    const { backgroundColor } = getComputedStyle(node), { width, height } = node.getBoundingClientRect();
    return !node.firstChild && color(backgroundColor) && Math.min(width, height) >= 8 && seen(node);
  };
  const drawn = (shape) => { // an outline is seen although the mouse would pass through it
    const box = shape.getBoundingClientRect();
    const hit = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    return styled(shape) && (shape.ownerSVGElement.contains(hit) || scrolled(shape, box));
  };

  // ---- what can be used ----

  const usable = () => {
    const found = new Set(document.body.querySelectorAll(USABLE));
    for (const node of document.body.querySelectorAll("*:not(#wrap, #area)")) {
      if (episode.listens(node, MOUSE)) found.add(node);
      else if (getComputedStyle(node).cursor === "pointer" && !node.closest("label") &&
        getComputedStyle(node.parentNode).cursor !== "pointer") found.add(node);
      episode.served(node, MOUSE).forEach((child) => found.add(child));
    }
    return found;
  };

  // ---- words ----

  const squeeze = (text, most = MAX_NAME) => {
    const short = text.replace(/\s+/g, " ").trim();
    return short.length > most ? short.slice(0, most) + "..." : short;
  };
  const quote = (text, most) => `"${squeeze(text, most).replace(/[\\"]/g, "\\$&")}"`;
  const inline = (node) => node.tagName !== "BR" && /^(inline|table-cell|contents)/.test(getComputedStyle(node).display);

  const textOf = (node, omit = () => false) => {
    if (node.nodeType === Node.TEXT_NODE) return !node.data.trim() || readable(node) ? node.data : "";
    if (node.nodeType !== Node.ELEMENT_NODE || omit(node) || node.matches(UNSEEN)) return "";
    const inner = [...node.childNodes].map((child) => textOf(child, omit)).join("");
    return inline(node) ? inner : ` ${inner} `;
  };
  const color = (css) => {
    const [red, green, blue, alpha] = (css.match(/[\d.]+/g) ?? []).map(Number);
    if (red === undefined || alpha === 0) return "";
    const hex = "#" + [red, green, blue].map((part) => Math.round(part).toString(16).padStart(2, "0")).join("");
    return COLORS[hex] ?? hex;
  };
  const named = (node) => { // what an element without text is called
    if (node.querySelector(".ui-icon-closethick")) return "x"; // drawn as an x, titled "Close"
    const picture = node.matches("img") ? node : node.querySelector("img");
    const given = node.getAttribute("aria-label") || node.title || picture?.alt;
    const classes = [...node.classList].map((name) => name.replace(/^ui-/, ""))
      .filter((name) => !/^(corner|state|widget|button|sortable)\b/.test(name));
    return [given || [...classes, node.id].join(" "), color(getComputedStyle(node).backgroundColor)].join(" ");
  };
  const at = (node) => {
    const box = node.getBoundingClientRect();
    return [box.left + scrollX, box.top + scrollY, box.right + scrollX, box.bottom + scrollY].map(Math.round);
  };
  const shape = (node) => {
    const { fill, stroke } = getComputedStyle(node), [left, top, right, bottom] = at(node);
    const paint = color(fill) || color(stroke), size = Math.max(right - left, bottom - top) > 14 ? "large" : "small";
    const kind = { text: node.textContent, rect: "rectangle" }[node.tagName] ??
      (node.tagName === "polygon" && node.points.length === 3 ? "triangle" : node.tagName);
    if (kind !== "line") return `shape ${quote(`${size} ${paint} ${kind}`)} at ${(left + right) >> 1},${(top + bottom) >> 1}`;
    const falls = (node.x2.baseVal.value > node.x1.baseVal.value) === (node.y2.baseVal.value > node.y1.baseVal.value);
    return `shape "${paint} line" from ${left},${falls ? top : bottom} to ${right},${falls ? bottom : top}`;
  };

  // ---- one line for one element ----

  const field = (node) => {
    const label = node.labels?.length ? quote(textOf(node.labels[0], (inner) => inner === node)) : "";
    if (node.tagName === "SELECT") {
      const options = [...node.options].map((option) => quote(option.text));
      const chosen = [...node.selectedOptions].map((option) => quote(option.text)).join(", ");
      const more = options.splice(MAX_OPTIONS).length;
      return [node.multiple ? "select multiple" : "select", label, `options ${options.join(", ")}`,
        more && `... ${more} more`, chosen && `value=${chosen}`];
    }
    if (BUTTON.test(node.type)) return ["button", quote(node.value || node.alt || node.type)];
    if (/^(checkbox|radio)$/.test(node.type)) return [node.type, label, node.checked && "checked"];
    return [node.tagName === "TEXTAREA" ? "textarea" : `input ${node.type}`, label || (node.id && `#${node.id}`),
      node.placeholder && `placeholder=${quote(node.placeholder)}`, node.value && `value=${quote(node.value, MAX_VALUE)}`,
      document.activeElement === node && "focused"];
  };
  const widget = (node, text) => {
    const tab = node.tagName === "BUTTON" ? null : node.closest("[role=tab]");
    const name = squeeze(text) || squeeze(named(node));
    if (node.tagName === "svg") return ["drawing from", ...at(node).join(",").replace(/,(\d+),/, ",$1 to ").split(" ")];
    const role = tab ? "tab"
      : node.tagName === "BUTTON" || /\b(btn|button)\b/.test(node.className) ? "button"
      : node.tagName === "A" || node.matches(".alink") ? "link"
      : node.isContentEditable ? "editor" : squeeze(text) ? "item" : "icon";
    return [role, name && quote(name), tab?.getAttribute("aria-selected") === "true" && "selected"];
  };
  const line = (node, text) => [
    ...(node.matches(FIELD) ? field(node) : node.matches(SHAPE) ? [shape(node)] : widget(node, text)),
    node.disabled && "disabled", `[${refs.get(node)}]`,
  ].filter(Boolean).join(" ");

  // ---- the whole page ----

  const observe = (found) => {
    const lines = [];
    let run = "";
    const flush = () => { if (run.trim()) lines.push(`text ${quote(run)}`); run = ""; };
    const visit = (node) => { // lists a usable node; false if there is only what lies in it to be listed
      const inner = [...found].filter((other) => other !== node && node.contains(other));
      const lone = node.matches(`${FIELD}, button`);
      if (!lone && inner.some((other) => other.matches(`${FIELD}, button`))) return false;
      const text = node.matches(FIELD) ? "" : textOf(node, (other) => inner.includes(other));
      if (!lone && inner.length && !text.trim()) return false;
      if (node.type === "hidden" || !seen(node)) return true;
      flush();
      if (!refs.has(node)) refs.set(node, nodes.push(node) - 1);
      lines.push(line(node, text));
      return true;
    };
    const walk = (node, mute) => { // mute: the text is already told
      if (node.nodeType === Node.TEXT_NODE) {
        if (!mute && (!node.data.trim() || readable(node))) run += node.data;
        return;
      }
      if (node.nodeType !== Node.ELEMENT_NODE || node.matches(UNSEEN)) return;
      const { display } = getComputedStyle(node);
      if (display === "none") return;
      if (!inline(node)) flush();
      else if (display === "table-cell") run += " ";
      if (found.has(node)) mute = (visit(node) && node.tagName !== "svg") || mute;
      else if (node.matches(SHAPE) && !mute) {
        flush();
        if (drawn(node)) lines.push(shape(node));
        mute = true;
      } else if (block(node) && !mute) {
        flush();
        lines.push(`box ${quote(color(getComputedStyle(node).backgroundColor))}`);
      } else if (node.tagName === "LABEL" && node.control && seen(node.control)) mute = true;
      if (!node.matches(FIELD)) node.childNodes.forEach((child) => walk(child, mute));
      if (!inline(node)) flush();
    };
    walk(document.body, false);
    flush();
    let length = 0;
    const fits = lines.findIndex((each) => (length += each.length + 1) > MAX_TEXT);
    return (fits < 0 ? lines : [...lines.slice(0, fits), `... ${lines.length - fits} more lines`]).join("\n");
  };

  // An icon drawn by `content: url(...)` has no width, so no place to click, before its picture is there.
  const loaded = new Set();
  const pictures = async (found) => {
    const drawings = [...found].map((node) => /^url\("(.*)"\)/.exec(getComputedStyle(node).content)?.[1]);
    const sources = [...drawings, ...[...document.images].map(({ src }) => src)];
    await Promise.all(sources.filter((source) => source && !loaded.has(source)).map(async (source) => {
      loaded.add(source);
      const picture = new Image();
      picture.src = source;
      await picture.decode().catch(() => {});
    }));
  };
  const look = async () => {
    await episode.quiet();
    const found = usable();
    await pictures(found);
    return { text: observe(found), verdict: episode.verdict() };
  };
  const reset = async (seed) => {
    nodes = [null];
    refs = new Map();
    const instruction = episode.begin(seed);
    return { ...(await look()), instruction };
  };

  // ---- where to act ----

  const typed = (node) => node && !node.disabled && !node.readOnly && (node.isContentEditable ||
    (node.matches("input, textarea") && !NOT_TYPED.test(node.type)));
  const locate = (ref) => {
    const node = /^[1-9]\d{0,5}$/.test(ref) ? nodes[Number(ref)] : undefined;
    if (!node) return { error: `there is no [${ref}]` };
    if (!node.isConnected) return { error: `[${ref}] is no longer on the page` };
    if (!spot(node)) node.scrollIntoView({ block: "center", inline: "nearest", behavior: "instant" });
    const place = styled(node) && spot(node);
    if (!place) return { error: `[${ref}] cannot be seen now` };
    const focus = document.activeElement; // a terminal types into a field that nobody sees
    const into = typed(node) ? node : node.contains(focus) && typed(focus) ? focus : null;
    let keys = false;
    for (let above = into; above; above = above.parentNode) keys ||= episode.listens(above, KEYS);
    return { ...place, list: node.tagName === "SELECT", typed: into !== null, parts: IN_PARTS.test(node.type), keys };
  };
  // How to reach an option: by arrow keys from the one that is chosen, in a list that shows many by a click.
  const option = (ref, text) => {
    const place = locate(ref), list = nodes[Number(ref)];
    if (place.error) return place;
    if (!place.list) return { error: `[${ref}] is not a list of options` };
    const options = [...list.options].filter(({ disabled }) => !disabled);
    const index = options.findIndex((each) => squeeze(each.text) === squeeze(text));
    if (index < 0) return { error: `[${ref}] has no option ${quote(text, 60)}` };
    if (list.multiple) {
      options[index].scrollIntoView({ block: "nearest", behavior: "instant" });
      const box = options[index].getBoundingClientRect();
      return { x: box.left + box.width / 2, y: box.top + box.height / 2 };
    }
    list.focus();
    return { steps: index - options.indexOf(list.options[list.selectedIndex]) };
  };
  const painted = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return { reset, look, locate, option, painted };
})();
