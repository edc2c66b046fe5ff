// Stands in for miniwob/browser/episode.js on a page of the web, which has no seed and gives no verdict. It
// runs in an isolated world: the page's scripts can neither see it nor change what it reports. It cannot see
// who listens to the mouse, so an element counts as clickable by its tag, its role or its cursor.
globalThis.episode = (() => {
  "use strict";
  const ROLES = ["button", "link", "checkbox", "radio", "switch", "tab", "menuitem", "menuitemcheckbox",
    "menuitemradio", "option", "treeitem", "combobox", "slider", "spinbutton"];
  const usable = [", summary", "[contenteditable='']", "[contenteditable=plaintext-only]", "[draggable=true]",
    ...ROLES.map((role) => `[role=${role}]`)].join();
  const role = (node) => ROLES.find((name) => name === sight.attribute(node, "role"));
  const listens = (node, types) => types.includes("keydown"); // unknown, so text is typed key by key
  const STATES = { "[aria-selected=true]:not([role=tab])": "selected", "[aria-pressed=true]": "pressed",
    "[aria-expanded=true]": "expanded", "[aria-disabled=true]": "disabled" };
  const states = (node) => [
    ...Object.keys(STATES).filter((css) => sight.matches(node, css)).map((css) => [STATES[css]]),
    // its value, and what the browser's own bubble says beside it
    ["value", sight.attribute(node, "aria-valuenow")],
    ["says", sight.matches(node, ":user-invalid") && node.validationMessage]];
  const name = (node) => { // of an element or field without words
    const of = (css) => sight.find(node, css);
    const labels = sight.attribute(node, "aria-labelledby")?.split(/\s+/)
      .map((id) => document.getElementById(id)?.textContent);
    return labels?.join(" ") || sight.attribute(node, "title") || node.tagName !== "SELECT" &&
      (of("[aria-label]")?.ariaLabel || of("svg title")?.textContent || of("[class]")?.classList.value);
  };
  let scrolled = -Infinity;
  addEventListener("scroll", () => { scrolled = performance.now(); }, true);
  const moving = () => performance.now() < scrolled + 100 || document.getAnimations().some((each) =>
    each.playState === "running" && each.effect?.getComputedTiming().endTime < Infinity);
  // Only what lies in the window is listed; these lines say that there is more. Where the document does not
  // scroll, what lies in the middle of the window may.
  const ways = (node, free, above = "above", below = "below") => { // in which it can be scrolled
    const { overflowX, overflowY } = getComputedStyle(node);
    return [free.test(overflowY) && node.scrollTop > 1 && above,
      free.test(overflowY) && node.scrollTop + node.clientHeight < node.scrollHeight - 1 && below,
      free.test(overflowX) && node.scrollWidth > node.clientWidth + 1 && "beside (dx)",
    ].filter(Boolean).join(" and ");
  };
  const windowed = () => {
    const root = document.scrollingElement ?? document.documentElement;
    const keys = !sight.matches(document.activeElement ?? root, "select, input[type=range]");
    const fixed = [root, document.body].some(
      (node) => node && /hidden|clip/.test(getComputedStyle(node).overflowY));
    const all = !fixed && ways(root, /./, ...(keys ? ["above (PageUp)", "below (PageDown)"] : []));
    if (all) return [`... more ${all}: ${/\(P/.test(all) ? "PRESS the key, or " : ""}SCROLL`];
    let part = document.elementFromPoint(innerWidth / 2, innerHeight / 2), inside = "";
    while (part && !(inside = /^(TEXTAREA|SELECT)$/.test(part.tagName) ? "" : ways(part, /auto|scroll/))) {
      part = sight.parent(part);
      if (part === document) break;
    }
    return inside ? [`... more ${inside}: SCROLL what lies there, or CLICK_AT it and PRESS PageDown`] : [];
  };
  return { usable, role, states, name, moving, listens, windowed, served: () => [], quiet: async () => {},
    verdict: () => null };
})();
