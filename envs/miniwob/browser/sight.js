// Which elements a person sees, and which of them can be used.
window.sight = (() => {
  "use strict";
  const MOUSE = ["click", "dblclick", "mousedown", "mouseup", "pointerdown"];
  const UNSEEN = ["script, style, noscript, template", episode.frame].filter(Boolean).join();
  const USABLE = `a, button, input, select, textarea, [onclick], [onmousedown], [contenteditable=true],
    [tabindex='0'], .ui-sortable > *, .ui-droppable, .ui-wrapper > .ui-resizable-se${episode.usable ?? ""}`;
  const IN_PARTS = /^(date|time|month|week|datetime-local)$/; // fields of several parts, typed from the left
  const SPOTS = [[0.5, 0.5], [0.25, 0.5], [0.75, 0.5], [0.5, 0.2], [0.5, 0.8], [0.1, 0.1], [0.9, 0.9]];

  // By the prototype, because a field can hide a form's method: <input name=contains> is form.contains.
  const matches = (node, css) => Element.prototype.matches.call(node, css);
  const contains = (node, other) => Node.prototype.contains.call(node, other);
  const parentNode = Object.getOwnPropertyDescriptor(Node.prototype, "parentNode").get;
  const parent = (node) => parentNode.call(node);
  const childNodes = Object.getOwnPropertyDescriptor(Node.prototype, "childNodes").get;
  const children = (node) => [...childNodes.call(node)];
  const hidden = (node) => matches(node, UNSEEN) || getComputedStyle(node).display === "none";
  const styled = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const hit = (box, right, down) =>
    document.elementFromPoint(box.left + right * box.width, box.top + down * box.height);

  // A point where the mouse meets the node itself; null if it is covered, clipped or scrolled away.
  const spot = (node) => {
    for (const box of node.getClientRects()) {
      const spots = IN_PARTS.test(node.type) && box.width ? [[8 / box.width, 0.5]] : SPOTS;
      const free = spots.find(([right, down]) => contains(node, hit(box, right, down)));
      if (free) return { x: box.left + free[0] * box.width, y: box.top + free[1] * box.height };
    }
    return null;
  };
  // Whether a node is out of sight only by scrolling: the innermost box that cuts it off can scroll it back.
  const scrolled = (node, box) => {
    const x = box.left + box.width / 2, y = box.top + box.height / 2;
    const outside = x > innerWidth || y > innerHeight || y < 0;
    if (outside && episode.windowed) return false; // a long page is shown a window at a time
    for (let above = parent(node); above && above !== document.body; above = parent(above)) {
      const { overflow } = getComputedStyle(above), outer = above.getBoundingClientRect();
      const right = x - outer.left - above.clientLeft, down = y - outer.top - above.clientTop;
      const within = right >= 0 && right < above.clientWidth && down >= 0 && down < above.clientHeight;
      if (overflow !== "visible" && !within) return /auto|scroll/.test(overflow);
    }
    return outside;
  };
  const seen = (node) => {
    const box = node.getBoundingClientRect();
    return box.width + box.height > 0 && styled(node) && (spot(node) !== null || scrolled(node, box));
  };
  const range = document.createRange();
  const readable = (text) => {
    range.selectNode(text);
    const boxes = [...range.getClientRects()].filter(({ width, height }) => width > 0 && height > 0);
    if (!boxes.length || !styled(text.parentElement)) return false;
    let solid = text.parentElement; // a disabled node may let the mouse pass, and is read all the same
    while (getComputedStyle(solid).pointerEvents === "none" && solid !== document.documentElement) {
      solid = parent(solid);
    }
    const met = (box) => [0.5, 0.1, 0.9].some((right) => contains(solid, hit(box, right, 0.5)));
    return (episode.windowed ? boxes.some(met) : met(boxes[0])) || scrolled(text, boxes[0]);
  };
  // On a page that is shown a window at a time, the words of a text that lie in the window.
  const inWindow = (text) => {
    const within = ({ top, bottom }) => top + bottom > 0 && top + bottom < 2 * innerHeight;
    range.selectNode(text);
    if (!episode.windowed || [...range.getClientRects()].every(within)) return text.data;
    return text.data.replace(/\S+/g, (word, at) => {
      range.setStart(text, at);
      range.setEnd(text, at + word.length);
      return within(range.getBoundingClientRect()) ? word : "";
    });
  };
  const drawn = (shape) => { // an outline is seen, although the mouse passes through it
    const box = shape.getBoundingClientRect();
    return styled(shape) && (contains(shape.ownerSVGElement, hit(box, 0.5, 0.5)) || scrolled(shape, box));
  };
  const bare = (node) => { // an empty block that is seen by its colour alone
    const { width, height } = node.getBoundingClientRect();
    return !node.firstChild && Math.min(width, height) >= 8 && seen(node);
  };

  const usable = () => {
    const found = new Set(document.body.querySelectorAll(USABLE));
    for (const node of document.body.querySelectorAll("*:not(#wrap, #area)")) {
      if (episode.listens(node, MOUSE)) found.add(node);
      else if (getComputedStyle(node).cursor === "pointer" && !node.closest("label") &&
        getComputedStyle(parent(node)).cursor !== "pointer") found.add(node);
      episode.served(node, MOUSE).forEach((child) => found.add(child));
    }
    if (!episode.windowed) return found;
    for (const label of document.body.querySelectorAll("label")) { // drawn in place of its input
      if (label.control && !seen(label.control)) found.add(label);
    }
    for (const node of found) if (!seen(node)) found.delete(node);
    return found;
  };
  return { IN_PARTS, contains, matches, parent, children, hidden, styled, spot, seen, readable, inWindow,
    drawn, bare, usable };
})();
