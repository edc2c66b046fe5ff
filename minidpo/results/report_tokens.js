// How training changed each token of a pair. `report.html` calls all of this.

const nats = value => minus((value < 0 ? "" : "+") + value.toFixed(2));
const share = logp => percent(Math.exp(logp));

// The box with a token's numbers, shown beside the token; the page has one.
function hint() {
  const box = make("div", { id: "hint", role: "status", hidden: true });
  document.body.append(box);
  let token;
  const place = () => {
    if (box.hidden) return;
    const [at, size] = [token.getClientRects()[0], box.getBoundingClientRect()];
    const most = document.documentElement.clientWidth - size.width - 8;
    box.style.left = `${Math.max(8, Math.min(at.left, most))}px`;
    const below = at.bottom + 6, above = at.top - size.height - 6;
    box.style.top = `${below + size.height < innerHeight ? below : above}px`;
  };
  const hide = () => box.hidden = true;
  const show = (node, rows) => {
    token = node;
    box.replaceChildren(make("strong", {}, JSON.stringify(token.dataset.text)), make("dl", {},
      ...rows.map(([name, ...values]) => make("div", {}, make("dt", {}, name),
        ...values.map(value => make("dd", { className: "num" }, value))))));
    box.hidden = false;
    place();
  };
  addEventListener("scroll", place, { passive: true });  // focusing a token may scroll the page
  document.addEventListener("keydown", event => event.key === "Escape" && hide());
  return { show, hide };
}

// The two agents whose log-probs a pair shows.
const agents = () => data.pairs[0].agents;

// `parts`: index of the first row in which the two sides differ; `counts`: how many rows training used.
function tokenSide(name, side, parts, counts, scale, note) {
  const [first, last] = agents();
  const nodes = [], runs = [];
  let index = 0;
  for (const [text, turn, before, after] of side.tokens) {
    if (runs.at(-1)?.turn !== turn) runs.push({ turn, nodes: [], text: "" });
    const run = runs.at(-1);
    run.text += text;
    if (turn >= 0) {
      const moved = after - before, tabIndex = nodes.length ? -1 : 0;
      const node = make("span", { className: "token", tabIndex }, text.replaceAll("\n", "\u21b5\n"));
      const strength = Math.round(100 * Math.min(1, Math.abs(moved) / scale));
      node.style.background = `color-mix(in srgb, var(--${moved < 0 ? "less" : "more"}) ${strength}%, ` +
        "transparent)";
      node.dataset.text = text;
      node.classList.toggle("parts", index === parts);
      node.classList.toggle("unread", index >= counts);
      const read = () => note.show(node, [[first, share(before), nats(before)],
        [last, share(after), nats(after)], ["change", "", `${nats(moved)} nats`]]);
      for (const kind of ["pointerenter", "focus", "click"]) node.addEventListener(kind, read);
      for (const kind of ["pointerleave", "blur"]) node.addEventListener(kind, note.hide);
      nodes.push(node);
      run.nodes.push(node);
    }
    index++;
  }
  const sum = which => side.tokens.slice(0, counts).reduce((total, token) => total + (token[which] ?? 0), 0);
  const section = make("section", {}, make("h3", {}, name,
    make("span", { className: "tag " + mood(side.outcome) }, side.outcome)),
    make("p", { className: "small" }, `log-prob ${nats(sum(2))} under ${first} and ` +
      `${nats(sum(3))} under ${last}, a change of ${nats(sum(3) - sum(2))}`),
    ...runs.filter(run => run.text.trim()).map(run => run.turn < 0
      ? make("details", {}, make("summary", {}, run === runs[0] ? "prompt" : "page"),
        make("pre", {}, run.text))
      : make("div", { className: "tokens", role: "group", ariaLabel: `${name}, turn ${run.turn + 1}` },
        ...run.nodes)));
  section.addEventListener("keydown", event => {  // one Tab stop; arrows go from token to token
    const at = nodes.indexOf(event.target);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    if (!nodes[to]) return;
    nodes[at].tabIndex = -1;
    nodes[to].tabIndex = 0;
    nodes[to].focus();
  });
  return section;
}

// Whether training cut the rejected side after the first token that differs.
const cutInRejected = (pair, parts) => pair.until === "token" && pair.rejected.tokens[parts]?.[1] >= 0;

function explorer(pairs) {
  const moves = pairs.flatMap(pair => [pair.chosen, pair.rejected]).flatMap(side => side.tokens)
    .filter(token => token[1] >= 0).map(token => Math.abs(token[3] - token[2])).sort((a, b) => a - b);
  // the 98 % quantile, so that a few outliers do not make all other tokens pale
  const scale = Math.max(0.5, moves[Math.floor(0.98 * moves.length)] ?? 0);
  const note = hint(), sides = make("div", { className: "episodes" });
  const open = index => {
    const { chosen, rejected } = pairs[index];
    const parts = chosen.tokens.findIndex(([text], k) => text !== rejected.tokens[k]?.[0]);
    note.hide();
    const cut = cutInRejected(pairs[index], parts) ? parts + 1 : Infinity;
    sides.replaceChildren(tokenSide("chosen", chosen, parts, Infinity, scale, note),
      tokenSide("rejected", rejected, parts, cut, scale, note));
  };
  const choice = chooser("Pair", pairs.map(pair => `${pair.task}, seed ${pair.seed}, ${pair.source}`), open);
  const legend = make("div", { className: "small scale", id: "scale" },
    ...[`less likely ${nats(-scale)}`, "", `${nats(scale)} more likely`].map(text =>
      make("span", { className: "num" }, text)));
  legend.children[1].className = "gradient";
  open(0);
  return make("div", { id: "pairs" }, make("div", { className: "controls" }, choice.box), legend, sides);
}

// Says what the colours mean.
function explainPairs() {
  const [first, last] = agents();
  return `Training used these pairs. Tokens that ${last} makes more likely than ${first} are blue, those that ` +
    "it makes less likely are orange; the stronger the colour, the larger the difference of the two " +
    "log-probs, in nats. A bar marks the first token in which the two sides differ. Pale tokens after it " +
    "were cut off in training and are not in the sums. Point at a token or tap it to see its numbers; the " +
    "arrow keys move from token to token.";
}
