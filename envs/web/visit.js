// Stands in for miniwob/browser/episode.js on a page of the web, which has no seed and gives no verdict. It
// runs in an isolated world: the page's scripts can neither see it nor change what it reports. It cannot see
// who listens to the mouse, so an element counts as clickable by its tag, its role or its cursor.
globalThis.episode = (() => {
  "use strict";
  const ROLES = ["button", "link", "checkbox", "radio", "switch", "tab", "menuitem", "option", "combobox"];
  const usable = [", summary", "[contenteditable='']", "[contenteditable=plaintext-only]",
    ...ROLES.map((role) => `[role=${role}]`)].join();
  const role = (node) => ROLES.find((name) => name === node.getAttribute("role"));
  const listens = (node, types) => types.includes("keydown"); // unknown, so text is typed key by key
  // Only what lies in the window is listed; these lines say that there is more. Where the document does not
  // scroll, what lies in the middle of the window may.
  const scrolls = (node) => !/^(TEXTAREA|SELECT)$/.test(node.tagName) &&
    node.scrollHeight > node.clientHeight + 1 && /auto|scroll/.test(getComputedStyle(node).overflowY);
  const ways = ({ scrollTop, clientHeight, scrollHeight }, above, below) => [scrollTop > 1 && above,
    scrollTop + clientHeight < scrollHeight - 1 && below].filter(Boolean).join(" and ");
  const windowed = () => {
    const all = ways(document.scrollingElement ?? document.documentElement, "above (PageUp)",
      "below (PageDown)");
    if (all) return [`... more ${all}: PRESS the key, or SCROLL`];
    let part = document.elementFromPoint(innerWidth / 2, innerHeight / 2);
    while (part && !scrolls(part)) part = sight.parent(part);
    const inside = part && ways(part, "above", "below");
    return inside ? [`... more ${inside}: SCROLL what lies there, or CLICK_AT it and PRESS PageDown`] : [];
  };
  return { usable, role, listens, windowed, served: () => [], quiet: async () => {}, verdict: () => null };
})();
