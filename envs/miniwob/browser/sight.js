// Which elements a person can see, and which of them can be used.
window.sight = (() => {
  "use strict";
  const MOUSE = ["click", "dblclick", "mousedown", "mouseup", "pointerdown"];
  const UNSEEN = ["script, style, noscript, template", episode.frame].filter(Boolean).join();
  const USABLE = `a, button, input, select, textarea, [onclick], [onmousedown], [contenteditable=true],
    [tabindex='0'], .ui-sortable > *, .ui-droppable, .ui-wrapper > .ui-resizable-se${episode.usable ?? ""}`;
  const IN_PARTS = /^(date|time|month|week|datetime-local)$/; // fields with several parts, typed from the left
  // invisible characters (soft hyphens, spaces without width) and the letters of icon fonts
  const INVISIBLE = /[\u00ad\u200b\u2060\ufeff\p{Co}]/gu;
  const WORD = /\S{1,20}/gu; // at most 20 letters, because not all scripts have spaces
  const SPOTS = [[0.5, 0.5], [0.25, 0.5], [0.75, 0.5], [0.5, 0.2], [0.5, 0.8], [0.1, 0.1], [0.9, 0.9]];

  // Methods are taken from the prototype, because a field can hide a form's: <input name=contains> is form.contains.
  const method = (owner, name) => Function.prototype.call.bind(owner.prototype[name]);
  const getter = (owner, name) =>
    Function.prototype.call.bind(Object.getOwnPropertyDescriptor(owner.prototype, name).get);
  const [matches, domFind, rects, area, attribute, visible, intoView] = ["matches", "querySelector",
    "getClientRects", "getBoundingClientRect", "getAttribute", "checkVisibility",
    "scrollIntoView"].map((name) => method(Element, name));
  const [parentNode, childNodes] = ["parentNode", "childNodes"].map((name) => getter(Node, name));
  const [domContains, domClosest] = [method(Node, "contains"), method(Element, "closest")];

  // On a page of the web, open shadow trees are read, too: a host shows its shadow tree, and a slot what is assigned
  // to it. If there are none, as on MiniWoB, the engine's own functions find the same faster.
  const [shadow, slotOf, slotOfText] = [getter(Element, "shadowRoot"), getter(Element, "assignedSlot"),
    getter(Text, "assignedSlot")];
  let roots = [document]; // the document and the shadow roots of this look
  const parent = (node) => {
    const above = parentNode(node);
    if (roots.length === 1) return above;
    const slot = node instanceof Text ? slotOfText(node) : node instanceof Element ? slotOf(node) : null;
    return slot ?? (above instanceof ShadowRoot ? above.host : above);
  };
  const children = (node) => {
    const inner = roots.length > 1 && node instanceof Element && shadow(node);
    const assigned = roots.length > 1 && node instanceof HTMLSlotElement ? node.assignedNodes() : [];
    return assigned.length ? assigned : [...childNodes(inner || node)];
  };
  const contains = (node, inner) => {
    if (domContains(node, inner)) return true;
    while (roots.length > 1 && inner && inner !== node) inner = parent(inner);
    return inner === node;
  };
  const closest = (node, css) => {
    if (roots.length === 1) return domClosest(node, css);
    while (node instanceof Element && !matches(node, css)) node = parent(node);
    return node instanceof Element ? node : null;
  };
  const find = (node, css) => {
    if (roots.length === 1) return domFind(node, css);
    for (const child of children(node)) {
      const found = child instanceof Element && (matches(child, css) ? child : find(child, css));
      if (found) return found;
    }
    return null;
  };
  const boxed = (node) => { // the node itself or, if it has no box of its own, what contains it
    while (getComputedStyle(node).display === "contents") node = parent(node);
    return node;
  };
  const all = (css) =>
    roots.flatMap((root) => [...(root === document ? document.body : root).querySelectorAll(css)]);
  const focused = () => {
    let node = document.activeElement;
    while (node && shadow(node)?.activeElement) node = shadow(node).activeElement;
    return node;
  };
  const hidden = (node) => matches(node, UNSEEN) || getComputedStyle(node).display === "none";
  const styled = (node) => visible(node, { opacityProperty: true, visibilityProperty: true }) || clear(node);
  // a transparent field (opacity 0) over what the page draws in its place, if the mouse can reach it
  const clear = (node) => episode.windowed && matches(node, "input, select") && styled(boxed(parent(node))) &&
    getComputedStyle(node).opacity === "0" && spot(node) !== null;
  const under = (x, y) => { // the node at this point
    let met = document.elementFromPoint(x, y);
    if (roots.length === 1) return met;
    const inside = (host) => host && shadow(host)?.elementFromPoint(x, y);
    let inner = inside(met);
    while (inner && inner !== met) [met, inner] = [inner, inside(inner)];
    // for text in a slot Chromium returns the host, even if its own shadow root is asked
    const slot = inner && shadow(met).querySelector("slot:not([name]), slot[name='']");
    const box = slot && boxed(slot);
    return box && getComputedStyle(box).pointerEvents !== "none" && [...rects(box)].some((each) =>
      x >= each.left && x <= each.right && y >= each.top && y <= each.bottom) ? box : met;
  };
  const hit = (box, right, down) => under(box.left + right * box.width, box.top + down * box.height);

  // On a page that is shown a window at a time: the parts of the node, or of elements that float out of a link, that lie
  // in the window.
  const clipped = ({ left, top, right, bottom }) => {
    const x = Math.max(left, 0), y = Math.max(top, 0);
    return new DOMRect(x, y, Math.max(Math.min(right, innerWidth) - x, 0),
      Math.max(Math.min(bottom, innerHeight) - y, 0));
  };
  const flat = (node) => // its children, with what each slot shows instead of the slot
    children(node).flatMap((each) => each instanceof HTMLSlotElement ? flat(each) : [each]);
  const boxes = (node) => !episode.windowed ? rects(node)
    : [node, ...(matches(node, "a") ? flat(node).filter((each) => each instanceof Element) : [])]
      .flatMap((each) => [...rects(each)]).map(clipped);
  const meets = (node, met) => { // the mouse meets the node itself, not a button or link inside it
    const used = episode.windowed && met && closest(met, USABLE);
    return contains(node, met) && (!used || used === node || !contains(node, used));
  };
  // A point where the mouse meets the node itself; null if it is covered, clipped or scrolled away.
  const spot = (node) => {
    for (const box of boxes(node)) {
      const spots = IN_PARTS.test(node.type) && box.width ? [[8 / box.width, 0.5]] : SPOTS;
      const free = spots.find(([right, down]) => meets(node, hit(box, right, down))) ??
        (episode.windowed && spots.find(([right, down]) => contains(node, hit(box, right, down))));
      if (free) return { x: box.left + free[0] * box.width, y: box.top + free[1] * box.height };
    }
    return null;
  };
  // Whether a node is only scrolled out of sight: the innermost box that cuts it off can scroll it back.
  const scrolled = (node, box) => {
    const x = box.left + box.width / 2, y = box.top + box.height / 2;
    const outside = x > innerWidth || y > innerHeight || y < 0;
    if (outside && episode.windowed) return false; // a long page is shown a window at a time
    for (let above = parent(node); above && above !== document.body; above = parent(above)) {
      const { overflow } = getComputedStyle(above), outer = area(above);
      const right = x - outer.left - above.clientLeft, down = y - outer.top - above.clientTop;
      const within = right >= 0 && right < above.clientWidth && down >= 0 && down < above.clientHeight;
      if (overflow !== "visible" && !within) return /auto|scroll/.test(overflow);
    }
    return outside;
  };
  const disabled = (node) => // the node itself, or the control that a label is drawn instead of
    matches(episode.windowed && node.tagName === "LABEL" && node.control || node, ":disabled");
  const solid = (node) => { // the node that the mouse meets if this one lets it pass
    while (getComputedStyle(node).pointerEvents === "none" && node !== document.documentElement) {
      node = parent(node);
    }
    return node;
  };
  const passes = (node, box) => episode.windowed && disabled(node) && solid(node) !== node &&
    boxed(solid(node)) === hit(box, 0.5, 0.5);
  const seen = (node) => {
    const box = area(node), sized = box.width + box.height > 0; // a link around floating elements has no size
    return (sized || episode.windowed) && styled(node) &&
      (spot(node) !== null || sized && (scrolled(node, box) || passes(node, box)));
  };
  const PICTURES = "img, video, canvas, iframe, object, embed, input, select, textarea";
  const stack = method(Document, "elementsFromPoint"); // <img name=elementsFromPoint> hides the document's
  const paints = ({ backgroundColor, backgroundImage, backdropFilter, boxShadow }) =>
    backgroundImage !== "none" || backdropFilter !== "none" || / inset/.test(boxShadow) ||
    !/^rgba\(.*, 0\)$|\/ 0\)$/.test(backgroundColor);
  const shows = (node, x, y) => { // everything over it there is unpainted, such as a link over a whole card
    for (const over of stack(document, x, y)) {
      if (contains(node, over)) return true;
      if (shadow(over) || /-/.test(over.localName)) return false; // the paint of a shadow tree cannot be seen from here
      const parts = ["::before", "::after"].filter((part) =>
        !/^(none|normal)$/.test(getComputedStyle(over, part).content));
      // an ancestor covers the node by these parts, or by itself if it has none (z-index: -1)
      if (!contains(over, node) || !parts.length && over !== document.body) parts.unshift(null);
      if (visible(over, { opacityProperty: true }) && (!(over instanceof HTMLElement) ||
        matches(over, PICTURES) || parts.some((part) => paints(getComputedStyle(over, part))))) return false;
    }
    return false;
  };
  const range = document.createRange();
  const readable = (text) => {
    range.selectNode(text);
    const boxes = [...range.getClientRects()].filter(({ width, height }) => width > 0 && height > 0);
    const above = parent(text); // tells whether the text is hidden, even if it has no box of its own
    const owner = boxed(above);
    if (!boxes.length || getComputedStyle(above).visibility !== "visible" ||
      !visible(owner, { opacityProperty: true })) return false;
    const target = solid(owner); // a disabled node may let the mouse pass and is readable all the same
    const met = (box) => [0.5, 0.1, 0.9].some((right) => contains(target, hit(box, right, 0.5)) ||
      episode.windowed && shows(target, box.left + right * box.width, box.top + 0.5 * box.height));
    return (episode.windowed ? boxes.some(met) : met(boxes[0])) || scrolled(text, boxes[0]);
  };
  // On a page that is shown a window at a time, the words of a text that are in the window.
  const inWindow = (text) => {
    const within = ({ top, bottom }) => top + bottom > 0 && top + bottom < 2 * innerHeight;
    range.selectNode(text);
    if (!episode.windowed || [...range.getClientRects()].every(within)) return text.data;
    const words = [...text.data.matchAll(WORD)], lying = new Set();
    const search = (from, to) => { // by bisection: asking for the place of each word takes minutes in a long log
      range.setStart(text, words[from].index);
      range.setEnd(text, words[to].index + words[to][0].length);
      const box = range.getBoundingClientRect(), half = (from + to) >> 1;
      if (from === to) return within(box) && lying.add(words[from].index);
      if (box.bottom < 0 || box.top > innerHeight) return;
      search(from, half);
      search(half + 1, to);
    };
    search(0, words.length - 1);
    return text.data.replace(WORD, (word, at) => lying.has(at) ? word : "");
  };
  const drawn = (shape) => { // an outline is visible, although the mouse passes through it
    const box = area(shape);
    return styled(shape) && (contains(shape.ownerSVGElement, hit(box, 0.5, 0.5)) || scrolled(shape, box));
  };
  const bare = (node) => { // an empty block that is visible only by its colour
    const { width, height } = area(node);
    const inner = shadow(node) ? flat(node).filter((each) => each instanceof Text ? each.data.trim()
      : each instanceof Element && !hidden(each)) : children(node);
    return !inner.length && Math.min(width, height) >= 8 && seen(node);
  };

  const findRoots = () => { // the document and all open shadow roots, also nested ones
    roots = [document];
    for (const root of episode.windowed ? roots : []) { // the list grows in the loop
      root.querySelectorAll("*").forEach((node) => shadow(node) && roots.push(shadow(node)));
    }
    return roots;
  };
  const usable = () => {
    findRoots();
    const found = new Set(all(USABLE)), nodes = all("*:not(#wrap, #area)");
    episode.editors?.(nodes).forEach((node) => found.add(node));
    for (const node of nodes) {
      if (episode.listens(node, MOUSE)) found.add(node);
      else if (getComputedStyle(node).cursor === "pointer" && !closest(node, "label") &&
        getComputedStyle(parent(node)).cursor !== "pointer") found.add(node);
      episode.served(node, MOUSE).forEach((child) => found.add(child));
    }
    if (!episode.windowed) return found;
    for (const label of all("label")) { // drawn instead of its input
      if (label.control && !seen(label.control)) found.add(label);
    }
    for (const node of found) if (!seen(node)) found.delete(node);
    return found;
  };
  return { IN_PARTS, INVISIBLE, matches, closest, find, area, attribute, intoView, parent, children, hidden,
    styled, spot, seen, disabled, readable, inWindow, drawn, bare, usable, under, focused, findRoots };
})();
