// The page as text, one element per line in reading order, and where to put the mouse for a reference.
window.mini = (() => {
  "use strict";
  const { IN_PARTS, INVISIBLE, matches, closest, find, area, attribute, intoView, parent, children, hidden,
    styled, spot, seen, disabled, readable, inWindow, drawn, bare, under, focused } = sight;
  const KEYS = ["keydown", "keypress", "keyup"];
  const FIELD = "input, select, textarea", BUTTON = /^(button|submit|reset|image)$/;
  const NOT_TYPED = /^(button|submit|reset|image|checkbox|radio|color|file|range)$/;
  const SHAPE = "svg circle, svg ellipse, svg line, svg path, svg polygon, svg polyline, svg rect, svg text";
  const MENU_ICON = ".ui-menu .ui-icon:not(.ui-menu-icon)"; // the latter only marks a submenu
  const COLORS = {
    "#000000": "black", "#ffffff": "white", "#808080": "grey", "#ff0000": "red", "#008000": "green",
    "#0000ff": "blue", "#ffff00": "yellow", "#00ffff": "aqua", "#ff00ff": "magenta", "#00ff00": "lime",
    "#800080": "purple", "#ffa500": "orange", "#ffc0cb": "pink", "#808000": "olive",
  };
  const HUES = ["red", "orange", "yellow", "green", "green", "green", "aqua", "blue", "blue", "purple",
    "magenta", "red"]; // from 0 degrees in steps of 30
  const CAPTIONS = { submit: "Submit", reset: "Reset" }; // as the browser draws them
  const PLAIN = /^[\p{L}\p{N}_.:-]+$/u; // an id that needs no quotes
  const MAX_NAME = 300, MAX_VALUE = 2000, MAX_OPTIONS = 40, MAX_TEXT = episode.windowed ? 4000 : 6000;
  const MAX_RUN = episode.windowed ? MAX_VALUE : MAX_NAME; // for plain text, which matters on the web

  // A reference belongs to one node as long as it lives, and is never reused in an episode.
  let nodes, refs;

  // Words.

  const whole = (text) => text.toWellFormed?.() ?? text; // without half an emoji where the text was cut
  const squeeze = (text, most = MAX_NAME) => {
    const short = text.replace(INVISIBLE, "").replace(/[\s\p{Cc}]+/gu, " ").trim();
    return short.length > most ? whole(short.slice(0, most)) + "..." : short;
  };
  const quote = (text, most) => `"${squeeze(text, most).replace(/[\\"]/g, "\\$&")}"`;
  const inline = (node) =>
    node.tagName !== "BR" && /^(inline|table-cell|contents)/.test(getComputedStyle(node).display);
  const editable = (node) => node.isContentEditable === true || // a form's field may have this name
    Boolean(episode.editor?.(node));
  const told = (text) => !text.data.trim() ? text.data : readable(text) ? inWindow(text) : "";
  const textOf = (node, omit) => {
    if (node instanceof Text) return told(node);
    if (!(node instanceof Element) || omit(node) || hidden(node)) return "";
    if (matches(node, MENU_ICON)) return ` ${sign(node)} `;
    if (episode.windowed && node.tagName === "IMG") return seen(node) ? ` ${node.alt} ` : "";
    const inner = children(node).map((child) => textOf(child, omit)).join("");
    return inline(node) && getComputedStyle(node).display !== "table-cell" ? inner : ` ${inner} `;
  };
  let brush; // draws colours that are not given as red, green and blue, such as oklch(...)
  const dot = (css) => {
    brush ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    brush.clearRect(0, 0, 1, 1);
    brush.fillStyle = "transparent"; // remains if css is no colour
    brush.fillStyle = css;
    brush.fillRect(0, 0, 1, 1);
    return [...brush.getImageData(0, 0, 1, 1).data];
  };
  const hue = (red, green, blue) => { // what a person calls a colour that has no name
    const most = Math.max(red, green, blue), span = most - Math.min(red, green, blue);
    if (span < 12) return ""; // the number of a grey says more than a name
    const sixths = most === red ? (green - blue) / span : most === green ? 2 + (blue - red) / span
      : 4 + (red - green) / span;
    return HUES[Math.round(2 * sixths + 12) % 12] + " ";
  };
  const color = (css) => {
    const numbers = /^(rgb|none)/.test(css) ? css.match(/[\d.]+/g) ?? [] : dot(css);
    const [red, green, blue, alpha] = numbers.map(Number);
    if (red === undefined || alpha === 0) return "";
    const digits = [red, green, blue].map((part) => Math.round(part).toString(16).padStart(2, "0"));
    const code = "#" + digits.join("");
    return COLORS[code] ?? hue(red, green, blue) + code;
  };
  const ground = (node) => color(getComputedStyle(node).backgroundColor);
  const sign = (node) => // an empty element that is visible only by its icon or colour
    node.firstChild ? "" : node.classList.value.match(/ui-(icon-\S+)/)?.[1] ?? ground(node);
  // the instruction, with icons as words and colours as numbers
  const asked = (node) => sign(node).replace(/.* #/, "#") || children(node)
    .map((child) => child.nodeType === Node.ELEMENT_NODE ? asked(child) : child.data).join("");
  const named = (node) => { // the name of an element without text
    if (find(node, ".ui-icon-closethick")) return "x"; // drawn as an x, titled "Close"
    const picture = matches(node, "img") ? node : find(node, "img");
    const given = attribute(node, "aria-label") || attribute(node, "title") || picture?.alt ||
      episode.name?.(node);
    const classes = (attribute(node, "class") ?? "").split(/\s+/).map((name) => name.replace(/^ui-/, ""))
      .filter((name) => !/^(corner|state|widget|button|sortable)\b/.test(name));
    // jQuery UI changes its elements' colour under the mouse, with a delay
    const paint = matches(node, ".ui-button, .ui-state-default, .ui-datepicker a") ? "" : ground(node);
    return [given || [...classes, attribute(node, "id")].join(" "), paint].join(" ");
  };
  const at = (node) => {
    const box = area(node);
    return [box.left + scrollX, box.top + scrollY, box.right + scrollX, box.bottom + scrollY].map(Math.round);
  };
  const onDrawing = (node) => { // the place of a label that lies over a drawing
    if (getComputedStyle(node).position !== "absolute") return "";
    const [left, top, right, bottom] = at(node), x = (left + right) >> 1, y = (top + bottom) >> 1;
    const over = [...document.querySelectorAll("#area svg")].map(at)
      .some((box) => x > box[0] && x < box[2] && y > box[1] && y < box[3]);
    return over ? ` at ${x},${y}` : "";
  };
  const shape = (node) => {
    const { fill, stroke } = getComputedStyle(node), [left, top, right, bottom] = at(node);
    const paint = color(fill) || color(stroke);
    if (node.tagName === "line") {
      const [x1, y1, x2, y2] = ["x1", "y1", "x2", "y2"].map((end) => node[end].baseVal.value);
      const falls = (x2 > x1) === (y2 > y1);
      return `shape "${paint} line" from ${left},${falls ? top : bottom} to ${right},${falls ? bottom : top}`;
    }
    const size = Math.max(right - left, bottom - top) > 14 ? "large" : "small";
    const kind = { text: node.textContent, rect: "rectangle" }[node.tagName] ??
      (node.tagName === "polygon" && node.points.length === 3 ? "triangle" : node.tagName);
    return `shape ${quote(`${size} ${paint} ${kind}`)} at ${(left + right) >> 1},${(top + bottom) >> 1}`;
  };

  // One line for one element.

  const marked = (node) => { // the text that is marked in a focused editor or textarea
    const text = focused() === node ? String(getSelection()) : "";
    return text && `marked=${quote(text, 60)}`;
  };
  const bar = ({ scrollTop, scrollHeight, clientHeight }) => // what its scroll bar shows
    scrollHeight <= clientHeight ? "" : scrollTop < 1 ? "at top"
      : scrollTop + clientHeight > scrollHeight - 2 ? "at bottom" : "midway";
  const drawnAs = (option) => option.label || option.text;
  const laid = (node) => getComputedStyle(node).display !== "none";
  const offered = (option) =>
    laid(option) && (option.parentNode.tagName === "SELECT" || laid(option.parentNode));
  // a field's line begins with its first label; its other labels are ordinary text
  const names = (label) => label.control !== null && matches(label.control, FIELD) &&
    !BUTTON.test(label.control.type) && label.control.labels[0] === label;
  const field = (node) => {
    const labelled = node.labels?.length ? textOf(node.labels[0], (inner) => inner === node) : "";
    const words = labelled.trim() || node.ariaLabel || episode.name?.(node);
    const label = words ? quote(words) : "";
    if (node.tagName === "SELECT") {
      // on a page of the web a longer line would leave no room for what follows
      const fitting = (options, room = MAX_VALUE) => {
        const told = options.map((option) => quote(drawnAs(option))).slice(0, MAX_OPTIONS);
        return told.filter((each) => (room -= each.length) > 0);
      };
      const options = [...node.options].filter(offered), first = fitting(options);
      const chosen = fitting([...node.selectedOptions], MAX_VALUE / 2).join(", ");
      const more = options.length - first.length;
      return [node.multiple ? "select multiple" : "select", label, `options ${first.join(", ")}`,
        more && `... ${more} more`, chosen && `value=${chosen}`];
    }
    if (BUTTON.test(node.type)) {
      const caption = attribute(node, "value") === null && CAPTIONS[node.type];
      return ["button", quote(node.value || node.alt || caption || words || node.type)];
    }
    if (/^(checkbox|radio)$/.test(node.type)) return [node.type, label, node.checked && "checked"];
    return [node.tagName === "TEXTAREA" ? "textarea" : `input ${node.type}`,
      label || (node.id && (PLAIN.test(node.id) ? `#${node.id}` : quote(node.id))),
      node.placeholder && `placeholder=${quote(node.placeholder)}`,
      node.value && `value=${quote(node.value, MAX_VALUE)}`, focused() === node && "focused",
      ...(node.tagName === "TEXTAREA" ? [marked(node), bar(node)] : [])];
  };
  const widget = (node, text) => {
    const tab = node.tagName === "BUTTON" ? null : closest(node, "[role=tab]");
    const alone = episode.windowed && attribute(node, "aria-label") && // its own label says more than a picture's
      text.trim() === find(node, "img")?.alt?.trim();
    const words = !alone && squeeze(text, MAX_RUN) || squeeze(named(node));
    const name = words && quote(words, MAX_RUN);
    const [left, top, right, bottom] = at(node);
    if (node.tagName === "svg") {
      return ["drawing", episode.windowed && name, `from ${left},${top} to ${right},${bottom}`];
    }
    const control = node.tagName === "LABEL" ? node.control : null; // drawn instead of its invisible input
    if (/^(checkbox|radio)$/.test(control?.type)) {
      return [control.type, name, control.checked && "checked"];
    }
    const role = episode.role?.(node) ?? (tab ? "tab"
      : node.tagName === "BUTTON" || /\b(btn|button)\b/.test(node.className) ? "button"
      : node.tagName === "A" || matches(node, ".alink") ? "link"
      : editable(node) ? "editor" : squeeze(text) ? "item" : "icon");
    const chosen = role === "tab" && attribute(tab ?? node, "aria-selected") === "true" ||
      matches(node, "button.selected, .page-item.active > a");
    const opens = matches(node, ".ui-menu *") && find(node, ".ui-menu-icon"); // drawn as an arrow
    const active = focused() === node &&
      (editable(node) || matches(node, ".ui-slider-handle")); // of several handles, the one that the keys move
    const dragged = matches(node, "#area .ui-sortable > *, #area > * > .ui-draggable");
    const checked = attribute(node, "aria-checked") === "true" && "checked"; // a check box that the page draws itself
    return [role, name, checked, chosen && "selected", opens && "submenu",
      active && "focused", editable(node) && marked(node),
      dragged && `at ${(left + right) >> 1},${(top + bottom) >> 1}`];
  };
  const line = (node, text) => [
    ...(matches(node, FIELD) ? field(node) : matches(node, SHAPE) ? [shape(node)] : widget(node, text)),
    disabled(node) && "disabled",
    ...(episode.states?.(node, quote) ?? []), `[${refs.get(node)}]`,
  ].filter(Boolean).join(" ");

  // The whole page.

  const observe = (found) => {
    const lines = [], inside = new Map([...found].map((node) => [node, []])); // node -> the usable nodes inside it
    for (const node of found) {
      for (let above = parent(node); above; above = parent(above)) inside.get(above)?.push(node);
    }
    let run = "";
    const flush = (where = "") => {
      if (squeeze(run)) lines.push(`text ${quote(run, MAX_RUN)}${where}`);
      run = "";
    };
    const visit = (node) => { // lists a usable node; false if only the nodes inside it are to be listed
      const inner = inside.get(node);
      const lone = matches(node, `${FIELD}, button`) || editable(node);
      const card = episode.windowed && getComputedStyle(node).cursor === "pointer"; // a row or a card
      if (!lone && !card && inner.some((other) => matches(other, `${FIELD}, button`))) return false;
      const text = matches(node, `${FIELD}, img`) ? "" : textOf(node, (other) => inner.includes(other));
      if (!lone && inner.length && !text.trim()) return false;
      if (matches(node, "input[type=hidden]") || !seen(node)) return false;
      flush();
      if (!refs.has(node)) refs.set(node, nodes.push(node) - 1);
      lines.push(line(node, text));
      return true;
    };
    const walk = (node, mute) => { // mute: the text is listed already
      if (node instanceof Text && !mute) run += told(node);
      if (!(node instanceof Element) || hidden(node)) return;
      if (!inline(node)) flush();
      else if (getComputedStyle(node).display === "table-cell") run += " ";
      if (found.has(node)) mute = (visit(node) && node.tagName !== "svg") || mute;
      else if (!mute && matches(node, MENU_ICON)) run += ` ${sign(node)} `;
      else if (node.tagName === "LABEL") mute ||= names(node) && seen(node.control);
      else if (!mute && matches(node, SHAPE)) {
        flush();
        if (drawn(node)) lines.push(shape(node));
        mute = true;
      } else if (!mute && node.tagName === "IMG" && node.alt && seen(node)) run += ` ${node.alt} `;
      else if (!mute && ground(node) && bare(node)) {
        flush();
        lines.push(`box "${ground(node)}"`);
      }
      if (!matches(node, FIELD)) children(node).forEach((child) => walk(child, mute));
      if (!inline(node)) flush(run.trim() ? onDrawing(node) : "");
    };
    walk(document.body, false);
    flush();
    let length = 0;
    const fits = lines.findIndex((each) => (length += each.length + 1) > MAX_TEXT);
    return (fits < 0 ? lines : [...lines.slice(0, fits), `... ${lines.length - fits} more lines`]).join("\n");
  };

  const from = (first) => { // begin to count references here
    nodes = Array(first).fill(null);
    refs = new Map();
  };
  const look = async () => {
    passed.left = 0;
    await episode.quiet();
    const text = document.body // a document that is still loading may have none
      ? [observe(sight.usable()), ...(episode.windowed?.() ?? [])].filter(Boolean).join("\n") : "";
    return { text: whole(text), verdict: episode.verdict(), given: nodes.length };
  };
  const reset = async (seed) => {
    from(1);
    const utterance = await episode.begin(seed); // an object on the natural-language mail pages
    const instruction = utterance.utterance ?? squeeze(asked(document.querySelector("#query")), Infinity);
    return { ...(await look()), instruction: whole(instruction) };
  };

  // Where to act.

  const typed = (node) => node && !matches(node, ":disabled") && !node.readOnly && (editable(node) ||
    (matches(node, "input, textarea") && !NOT_TYPED.test(node.type)));
  const locate = (ref) => {
    const node = /^[1-9]\d{0,5}$/.test(ref) ? nodes[Number(ref)] : undefined;
    if (!node) return { error: `there is no [${squeeze(ref, 40)}]` };
    if (!node.isConnected) return { error: `[${ref}] is no longer on the page` };
    if (!spot(node)) intoView(node, { block: "center", inline: "nearest", behavior: "instant" });
    const place = styled(node) && spot(node);
    const off = Boolean(episode.windowed) && disabled(node);
    if (!place) return { error: `[${ref}] ${off ? "is disabled" : "cannot be seen now"}` };
    const focus = focused(); // the terminal task types into an invisible field
    const into = typed(node) ? node : !episode.windowed && typed(focus) && !refs.has(focus) ? focus : null;
    let keys = false;
    for (let above = into; above; above = parent(above)) keys ||= episode.listens(above, KEYS);
    return { ...place, list: node.tagName === "SELECT", typed: into !== null, keys,
      parts: IN_PARTS.test(node.type) && (/^\d{4}-/.test(node.max) ? 4 : 6), // digits of a year
      line: Boolean(episode.windowed) && into?.tagName === "INPUT",
      held: into === node && episode.verdict() === null // null when the episode is over
        ? episode.writes?.(node)?.text ?? node.value ?? null : null,
      draws: Boolean(into && episode.writes?.(into)), icons: episode.icons?.() ?? false, slider: matches(node, "input[type=range]:enabled"),
      disabled: off };
  };
  // How to reach an option: with arrow keys from the chosen one. In a list that allows several choices, by a click,
  // which releases an option that is chosen already. On a page of the web also by a click if the page draws the option
  // itself. A list that draws its options, or takes keys, only when it is open has to be opened first.
  const option = (ref, text, check) => { // check: only look whether it is chosen, and leave the focus
    const place = locate(ref), list = nodes[Number(ref)];
    if (place.error) return place;
    if (!place.list) return { error: `[${ref}] is not a list of options` };
    if (matches(list, ":disabled")) return { error: `[${ref}] is disabled` };
    // keys stop at options that are displayed and not disabled, by themselves or by their group
    const options = [...list.options].filter((each) => !matches(each, ":disabled") && laid(each));
    const named = (each) => offered(each) && squeeze(drawnAs(each)) === squeeze(text);
    const index = options.findIndex(named), disabled = index < 0 && [...list.options].some(named);
    if (disabled) return { error: `option ${quote(text, 60)} of [${ref}] is disabled` };
    if (index < 0) return { error: `[${ref}] has no option ${quote(text, 60)}` };
    const web = Boolean(episode.windowed) && !check;
    const drawnHere = web && options[index].getClientRects().length > 0;
    const opens = web && !drawnHere &&
      (list.multiple || getComputedStyle(list).appearance === "base-select");
    if ((drawnHere || opens) && !matches(list, ":open")) {
      if (!list.multiple && options[index].selected) return {}; // a click could release it
      if (opens) return { opens: { x: place.x, y: place.y } };
    }
    if (drawnHere || list.multiple) {
      options[index].scrollIntoView({ block: "nearest", behavior: "instant" });
      const box = options[index].getBoundingClientRect();
      return { x: box.left + box.width / 2, y: box.top + box.height / 2, several: list.multiple };
    }
    if (!check && !opens) {
      if (episode.windowed && matches(list, ":open")) list.blur(); // its popup would take the keys
      list.focus();
    }
    const chosen = options.indexOf(list.options[list.selectedIndex]);
    const above = options.filter((each) => each.index < list.selectedIndex).length; // for a chosen option that is disabled
    const steps = chosen < 0 ? index - above + (index >= above) : index - chosen;
    if (opens) return { steps, enter: true }; // an open popup reports only one change
    listenForPassed(Node.prototype.getRootNode.call(list)); // change events do not leave a shadow tree
    passed = { list, left: Math.abs(steps) - 1 };
    return { steps };
  };
  const unselected = (ref) => { // keys that delete what Control+A did not select, because not every editor knows it
    const { text, selectionStart: a, selectionEnd: b } = episode.writes(nodes[Number(ref)]);
    const [from, to] = [Math.min(a, b), Math.max(a, b)], all = to - from === text.length;
    return all ? {} : { Backspace: from + (to > from), Delete: text.length - to };
  };
  let passed = { left: 0 }; // options passed on the way to another; a list opened by a person reports none of them
  const pass = (event) => {
    if (passed.left < 1 || event.composedPath()[0] !== passed.list) return;
    event.stopImmediatePropagation();
    if (event.type === "change") passed.left -= 1;
  };
  const listenForPassed = (tree) =>
    ["input", "change"].forEach((type) => tree.addEventListener(type, pass, true));
  listenForPassed(window);
  const slide = (ref, text) => { // how many arrow keys lead from its value to the wanted one
    const { min, max, step, value } = nodes[Number(ref)];
    nodes[Number(ref)].focus();
    const width = /^any$/i.test(step) ? ((max || 100) - min) / 100 : step > 0 ? step : 1;
    const steps = Math.round((text - value) / width) || 0;
    return { steps: Math.max(-1000, Math.min(steps, 1000)), value };
  };
  const where = (ref) => { // its box in a screenshot, without scrolling
    const node = nodes[Number(ref)], box = node?.isConnected && area(node);
    return { box: box ? [box.left, box.top, box.width, box.height].map(Math.round) : null };
  };
  let framed = null, before = null;
  const mark = (ref, x, y) => { // a frame around this element, or the one at x,y, until the next call; for envs/web
    if (framed && before === null) framed.removeAttribute("style");
    else if (framed) framed.setAttribute("style", before);
    framed = nodes[Number(ref)] ?? (x === undefined ? null : under(x, y));
    if (framed instanceof HTMLFormElement) framed = null; // a field of it may be named style
    if (!framed) return;
    before = framed.getAttribute("style");
    framed.style.setProperty("outline", "3px solid #e0245e", "important");
  };
  const painted = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const rested = async () => { // painted, and everything has stopped moving or a second has passed
    const limit = performance.now() + 1000;
    do await painted(); while (episode.moving() && performance.now() < limit);
  };
  const met = async (ref) => { // an icon under the mouse has no size until its other picture is loaded
    const limit = performance.now() + 500;
    while (!matches(nodes[Number(ref)], ":hover") && performance.now() < limit) {
      await new Promise((done) => setTimeout(done, 1));
    }
    await episode.quiet();
    return locate(ref);
  };
  return { from, reset, look, locate, met, option, unselected, slide, where, painted, rested, mark };
})();
