// Keeps everything in the tab. No page opens another tab or starts another program. The clipboard is the
// page's own, because Chromium's is shared by all pages and with the person who watches.
window.tab = (() => {
  "use strict";
  const stay = ({ target: form, submitter }) => { // its fields may be named "target"
    submitter?.removeAttribute("formtarget");
    Element.prototype.setAttribute.call(form, "target", "_self");
  };
  document.addEventListener("submit", stay, true);
  const follow = (event) => { // submit events do not leave a shadow tree; a script's requestSubmit there is not caught
    for (const tree of event.composedPath()) {
      if (tree instanceof ShadowRoot) tree.addEventListener("submit", stay, true);
    }
  };
  document.addEventListener("focusin", follow, true);
  document.addEventListener("click", (event) => {
    follow(event);
    const link = event.composedPath().find(({ tagName }) => tagName === "A" || tagName === "AREA");
    if (link) link.target = "_self"; // <base> may have set another target for all links
    if (link?.href && !/^(https?|file|javascript|blob):/.test(link.href)) event.preventDefault();
  }, true);

  let copied = "";
  const clip = (event) => {
    event.preventDefault();
    const text = String(getSelection()); // also inside a field
    if (event.type === "paste") copied && document.execCommand("insertText", false, copied);
    else if (text) {
      copied = text;
      if (event.type === "cut") document.execCommand("delete");
    }
  };
  for (const type of ["copy", "cut", "paste"]) document.addEventListener(type, clip, true);
  return { forget: () => { copied = ""; } };
})();
