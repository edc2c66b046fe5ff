// Replaces miniwob/browser/episode.js on a page of the web, which has no seed and no verdict. It runs in an isolated
// world, so the page's scripts can neither see it nor change what it reports. It cannot see which elements listen to
// the mouse, so tag, role or cursor decide whether an element counts as clickable.
globalThis.episode = (() => {
  "use strict";
  const ROLES = ["button", "link", "checkbox", "radio", "switch", "tab", "menuitem", "menuitemcheckbox",
    "menuitemradio", "option", "treeitem", "combobox", "slider", "spinbutton"];
  const usable = [", summary", "[contenteditable='']", "[contenteditable=plaintext-only]", "[draggable=true]",
    ...ROLES.map((role) => `[role=${role}]`)].join();
  const role = (node) => ROLES.find((name) => name === sight.attribute(node, "role"));
  // Editors that draw their text themselves, with an EditContext or from key events. If the node that takes the keys is
  // not visible, the visible node around it is used instead.
  const takers = new WeakMap();
  const writes = (node) => { // the EditContext that it writes into
    const { editContext } = takers.get(node) ?? node; // a form's field may have this name
    return globalThis.EditContext && editContext instanceof EditContext ? editContext : null;
  };
  const draws = (node) => sight.matches(node, "[role=textbox], [role=searchbox]") && node.tabIndex >= 0 &&
    !sight.matches(node, "input, select, textarea, [aria-readonly=true], [aria-disabled=true]") &&
    !sight.find(node, "input, textarea, [contenteditable]");
  const editor = (node) => node instanceof HTMLElement && (writes(node) !== null || draws(node));
  const seenAs = (node) => {
    let shown = node;
    while (shown && shown !== document.body && !sight.seen(shown)) shown = sight.parent(shown);
    if (!writes(node) || !shown || shown === document.body) return node;
    if (shown !== node) takers.set(shown, node);
    return shown;
  };
  const editors = (nodes) => { // all editors among these nodes and the body, however they were made editable
    const edits = (node) => node?.isContentEditable === true;
    const found = nodes.filter((node) => editor(node) || edits(node) && !edits(sight.parent(node)));
    return [...found, ...[document.body].filter(edits)].map(seenAs);
  };
  const listens = (node, types) => types.includes("keydown"); // listeners are unknown, so text is typed key by key
  const STATES = { "[aria-selected=true]:not([role=tab])": "selected", "[aria-pressed=true]": "pressed",
    "[aria-expanded=true], details[open] > summary": "expanded",
    "[aria-checked=mixed], [type=checkbox]:indeterminate": "mixed",
    "[aria-disabled=true]": "disabled" };
  const states = (node, quote) => {
    const value = sight.matches(node, ":not(input)") && sight.attribute(node, "aria-valuenow");
    const says = sight.matches(node, ":user-invalid") && node.validationMessage; // shown in a bubble beside it
    return [...Object.keys(STATES).filter((css) => sight.matches(node, css)).map((css) => STATES[css])
      .filter((state) => state !== "disabled" || !sight.disabled(node)),
      value && `value=${quote(value)}`, says && `says=${quote(says)}`];
  };
  const name = (node) => { // the name of an element or field without words
    const inner = (key) => {
      const found = sight.find(node, `[${key}]`);
      return found && sight.attribute(found, key);
    };
    const tree = Node.prototype.getRootNode.call(node); // a shadow tree has its own ids
    const labels = sight.attribute(node, "aria-labelledby")?.split(/\s+/)
      .map((id) => tree.getElementById(id)?.textContent).join(" ").trim();
    const field = sight.matches(node, "input, select, textarea"), [label] = field && node.labels || [];
    // words that were not read because only screen readers get them, or because they are covered or out of the window
    const plain = (each) => each instanceof HTMLElement && !(each instanceof HTMLFormElement);
    const unseen = label ? sight.children(label).filter((each) => each instanceof Text ||
      plain(each) && !sight.hidden(each) && !Node.prototype.contains.call(each, node))
      .map((each) => each instanceof Text ? each.data : each.innerText).join(" ")
      : !field && plain(node) && sight.area(node).height <= innerHeight && node.innerText || "";
    return labels || sight.attribute(node, "title") || unseen.replace(sight.INVISIBLE, "").trim() || !field &&
      (inner("aria-label") || sight.find(node, "svg title")?.textContent ||
        inner("class") && `${sight.attribute(node, "id") ?? ""} ${inner("class")}`);
  };
  let scrolledAt = -Infinity;
  const scrolls = () => { scrolledAt = performance.now(); };
  addEventListener("scroll", scrolls, true);
  const moving = () => { // scroll events are not heard outside their shadow tree
    const roots = sight.findRoots();
    roots.forEach((root) => root.addEventListener("scroll", scrolls, true));
    return performance.now() < scrolledAt + 100 || roots.some((root) => root.getAnimations().some((each) =>
      each.playState === "running" && each.effect?.getComputedTiming().endTime < Infinity));
  };
  // Only what is in the window is listed; these lines say that there is more. If the document does not scroll, the
  // element in the middle of the window may.
  const ways = (node, { overflowX, overflowY }, free, above = "above", below = "below") => [
    free.test(overflowY) && node.scrollTop > 1 && above,
    free.test(overflowY) && node.scrollTop + node.clientHeight < node.scrollHeight - 1 && below,
    free.test(overflowX) && node.scrollWidth > node.clientWidth + 1 && "beside (dx)",
  ].filter(Boolean).join(" and ");
  const windowed = () => {
    const root = document.scrollingElement ?? document.documentElement;
    const keys = !sight.matches(sight.focused() ?? root, "select, input[type=range]");
    const { documentElement: html, body } = document; // the window's scroll bars are those of the root, or else of the body
    const bars = getComputedStyle(getComputedStyle(html).overflow === "visible" && body || html);
    const named = keys ? ["above (PageUp)", "below (PageDown)"] : [];
    const all = ways(root, bars, /visible|auto|scroll/, ...named);
    const lines = all ? [`... more ${all}: ${/\(P/.test(all) ? "PRESS the key, or " : ""}SCROLL`] : [];
    if (/above|below/.test(all)) return lines;
    let part = sight.under(innerWidth / 2, innerHeight / 2), inside = "";
    for (; part instanceof Element && part !== root && !inside; part = sight.parent(part)) {
      const text = sight.matches(part, "textarea, select");
      inside = text ? "" : ways(part, getComputedStyle(part), /auto|scroll/);
    }
    if (inside) lines.push(`... more ${inside}: SCROLL what lies there, or CLICK_AT it and PRESS PageDown`);
    return lines;
  };
  return { usable, role, states, name, moving, listens, writes, editor, editors, windowed, served: () => [], quiet: async () => {},
    verdict: () => null };
})();
