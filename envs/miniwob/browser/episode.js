// Runs before the page's own scripts. Records which elements listen to the mouse (a MiniWoB button is as often a
// plain <div> as a <button>), when the page is quiet, and how its episode ended.
window.episode = (() => {
  "use strict";
  const TIMER_MS = 1000, PATIENCE_MS = 3000;

  // Listeners: node -> {event type: its listeners}.
  const heard = new WeakMap();
  const { addEventListener, removeEventListener } = EventTarget.prototype;
  EventTarget.prototype.addEventListener = function (type, listener, ...rest) {
    if (this && listener) {
      if (!heard.has(this)) heard.set(this, {});
      (heard.get(this)[type] ??= new Set()).add(listener);
    }
    return addEventListener.call(this ?? window, type, listener, ...rest);
  };
  EventTarget.prototype.removeEventListener = function (type, listener, ...rest) {
    heard.get(this)?.[type]?.delete(listener);
    return removeEventListener.call(this ?? window, type, listener, ...rest);
  };
  const handlers = (node, type) => window.jQuery?._data?.(node, "events")?.[type] ?? [];
  const listens = (node, types) => types.some((type) => {
    // jQuery adds one listener for all its handlers. If all of them are for descendants, the node is no control.
    const serving = handlers(node, type).length > 0 && handlers(node, type).every(({ selector }) => selector);
    return (heard.get(node)?.[type]?.size ?? 0) > (serving ? 1 : 0);
  });
  const served = (node, types) => types.flatMap((type) => handlers(node, type))
    .flatMap(({ selector }) => selector ? jQuery(node).find(selector).get() : []);

  // What the page still waits for: timers of at most a second, animation frames, pictures.
  const pending = new Set();
  const later = window.setTimeout.bind(window);
  const track = (start, stop) => {
    const begin = window[start].bind(window), end = window[stop].bind(window);
    window[start] = (callback, ms, ...rest) => {
      if (typeof callback !== "function" || ms > TIMER_MS) return begin(callback, ms, ...rest);
      const id = begin((...given) => { pending.delete(start + id); callback(...given); }, ms, ...rest);
      pending.add(start + id);
      return id;
    };
    window[stop] = (id) => { pending.delete(start + id); end(id); };
  };
  track("setTimeout", "clearTimeout");
  track("requestAnimationFrame", "cancelAnimationFrame");
  const shown = (picture) => picture.decode().catch(() => {});

  // An icon drawn by `content: url(...)` has no size, and so no place to click, until its file is loaded. These
  // pictures are kept in memory, so that such icons appear at once, also when they change under the mouse.
  const icons = [];
  const preload = () => {
    // All such icons are in style elements of the page. A linked sheet is a file, which scripts may not read.
    const sheets = [...document.styleSheets].filter(({ href }) => href === null);
    for (const sheet of sheets) for (const { cssText } of sheet.cssRules) {
      for (const [, path] of cssText.matchAll(/content: url\("(.*?)"\)/g)) {
        icons.push(new Image());
        icons.at(-1).src = new URL(path, document.baseURI);
      }
    }
    return Promise.all(icons.map(shown));
  };
  // Even then an icon may get its size a moment later, as happened on a busy machine.
  const blank = () => icons.length > 0 && [...document.querySelectorAll("#area *")].some((node) =>
    node.getClientRects().length && !node.offsetWidth && /^url/.test(getComputedStyle(node).content));

  const quiet = async () => {
    const limit = performance.now() + PATIENCE_MS;
    while ((pending.size || blank()) && performance.now() < limit) {
      await new Promise((done) => later(done, 1));
    }
    await Promise.all([...document.images].filter(({ complete }) => !complete).map(shown));
  };

  // Every page is loaded at the same date, because some pages show it.
  const { now } = Date, ahead = Date.UTC(2026, 0, 1, 12) - now();
  Date.now = () => now() + ahead;
  window.Date = new Proxy(Date, {
    construct: (target, given, made) => Reflect.construct(target, given.length ? given : [Date.now()], made),
  });
  Date.prototype.constructor = Date; // jQuery UI compares it with a value's constructor

  // The click that ends the last episode must not reach a new page's own listeners: a timer turns drag-cube's cube
  // while a button is down, and in 1 of 80 episodes the cube was turned at the start.
  let begun = false;
  for (const type of ["mousedown", "mouseup", "click"]) {
    addEventListener.call(window, type, (event) => { if (!begun) event.stopImmediatePropagation(); }, true);
  }
  let verdict = null; // raw reward when the episode first ended; later ends do not count
  addEventListener.call(document, "DOMContentLoaded", () => {
    if (typeof core === "undefined") return;
    console.log = window.open = () => null;
    core.EPISODE_MAX_TIME = 2147483647; // the longest timer; with one more it would fire at once
    core.countdownTimer = core.clearTimer = core.updateDisplay = core.reloadDisplay = () => {};
    core.canvasDrawClick = core.canvasClear = () => {}; // drawing the clicks took 0.6 ms each
    const end = core.endEpisode;
    core.endEpisode = (reward, ...rest) => {
      // bisect-angle divides 0 by 0 if the dot is on the corner
      if (core.EP_TIMER !== null) verdict ??= Number.isNaN(reward) ? -1 : reward;
      end(reward, ...rest);
    };
    if (window.jQuery) jQuery.fx.off = true; // animations jump to their end
    const style = document.createElement("style");
    // The START cover stays hidden, because a click on it would begin another episode without a seed.
    // #input-flicker is the terminal's blinking cursor; what is visible must not depend on the clock.
    style.textContent = `#sync-task-cover, #reward-display, #click-canvas, #input-flicker {
        display: none !important; }
      * { transition: none !important; animation: none !important; caret-color: transparent; }`;
    document.head.appendChild(style);
  });
  const begin = async (seed) => {
    if (!icons.length) await preload();
    tab.forget();
    begun = true;
    Math.seedrandom(seed);
    core.startEpisodeReal();
    scrollTo(0, 0);
    verdict = null; // last, because the old episode may have ended just now
    return core.getUtterance();
  };
  // The parts of the page that are MiniWoB's frame around the task, not elements of it.
  const frame = "#query, #reward-display, #sync-task-cover, #click-canvas";
  return { begin, quiet, listens, served, frame, icons: () => icons.length > 0, verdict: () => verdict };
})();
