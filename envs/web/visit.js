// Stands in for miniwob/browser/episode.js on a page of the web, which has no seed and gives no verdict. It
// runs in an isolated world: the page's scripts can neither see it nor change what it reports. It cannot see
// who listens to the mouse, so an element counts as clickable by its tag, its role or its cursor.
globalThis.episode = (() => {
  "use strict";
  const ROLES = ["button", "link", "checkbox", "radio", "switch", "tab", "menuitem", "option", "combobox"];
  const usable = [", summary", "[contenteditable='']", ...ROLES.map((role) => `[role=${role}]`)].join();
  const role = (node) => ROLES.find((name) => name === node.getAttribute("role"));
  const listens = (node, types) => types.includes("keydown"); // unknown, so text is typed key by key
  // Only what lies in the window is listed; these lines say that there is more.
  const windowed = () => {
    const { scrollTop, clientHeight, scrollHeight } =
      document.scrollingElement ?? document.documentElement;
    const ways = [scrollTop > 1 && "above (PageUp)", scrollTop + clientHeight < scrollHeight - 1 &&
      "below (PageDown)"].filter(Boolean);
    return ways.length ? [`... more ${ways.join(" and ")}: PRESS the key, or SCROLL`] : [];
  };
  return { usable, role, listens, windowed, served: () => [], quiet: async () => {}, verdict: () => null };
})();
