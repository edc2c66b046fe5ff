// Training curves: a chart for each logged number, rounds side by side. Read report_episodes.js next.

// Round marks (1, 2 or 5 times a power of ten) from low to high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, k) => (first + k) * step);
}

// parts: [{ round, offset, rows }], the rounds of a stage. A row's number is drawn at offset + its step.
function chart(title, keys, parts, unit) {
  const [width, height, left, right, top, bottom] = [320, 170, 40, 12, 14, 32];
  const lines = keys.map(key => parts.flatMap(({ rows, offset }) => {
    const pieces = [[]];  // null stands for nan or infinity and leaves a gap
    for (const row of rows) {
      if (isNumber(row[key])) pieces.at(-1).push([offset + row.step, row[key]]);
      else if (row[key] === null) pieces.push([]);
    }
    return pieces.filter(piece => piece.length);
  }));
  const steps = [...new Set(lines.flat(2).map(([step]) => step))].sort((a, b) => a - b);
  const values = lines.flat(2).map(([, value]) => value);
  const bound = (better, start) => values.reduce((a, b) => better(a, b), start);
  const [least, most] = [bound(Math.min, Infinity), bound(Math.max, -Infinity)];
  const room = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
  const [low, high] = [least - room, most + room];
  const [from, to] = [steps[0], steps.at(-1)], span = to - from || 1;
  const x = step => left + (step - from) / span * (width - left - right);
  const y = value => top + (high - value) / (high - low) * (height - top - bottom);
  const colour = key => keys.length > 1 && key.includes("rejected") ? colours[0] : colours[1];

  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
    "aria-label": `${title}: ${steps.length} ${unit}s; read them with the arrow keys` });
  const write = (text, x, y, anchor) => root.append(svg("text", { x, y, "text-anchor": anchor }, text));
  const rule = (kind, x1, y1, x2, y2) => root.appendChild(svg("line", { class: kind, x1, y1, x2, y2 }));
  for (const value of ticks(low, high, 4)) {
    rule("grid", left, y(value), width - right, y(value));
    write(number(value), left - 6, y(value) + 3.5, "end");
  }
  for (const step of ticks(from, from + span, 5).filter(Number.isInteger))
    write(step.toLocaleString("en"), x(step), height - bottom + 14, "middle");
  write(unit, width - right, height - 4, "end");
  if (parts.length > 1) parts.forEach(({ round, offset }, index) => {
    if (index) rule("grid", x(offset), top, x(offset), height - bottom);
    write(`round ${round}`, x(Math.max(from, offset)) + 3, 9, "start");
  });
  keys.forEach((key, index) => lines[index].forEach(points => {
    root.append(svg("polyline", { class: "line", stroke: colour(key),
      points: points.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") }));
    if (points.length <= 12) for (const [step, value] of points)
      root.append(svg("circle", { cx: x(step), cy: y(value), r: 2, fill: colour(key) }));
  }));
  const cross = rule("cross", 0, top, 0, height - bottom);

  const legend = make("div", { className: "legend num" });  // it also shows the values at a step
  let at = steps.length - 1;
  const show = (index, pointedAt) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at], { round, offset } = parts.findLast(part => part.offset < step) ?? parts[0];
    cross.setAttribute("visibility", pointedAt ? "visible" : "hidden");
    cross.setAttribute("x1", x(step));
    cross.setAttribute("x2", x(step));
    const which = parts.length > 1 ? `round ${round}, ` : "";
    const place = `${which}${unit} ${(step - offset).toLocaleString("en")}`;
    legend.replaceChildren(make("span", {}, place), ...keys.map((key, index) => {
      const point = lines[index].flat().findLast(([before]) => before <= step), swatch = make("i");
      swatch.style.background = colour(key);
      const name = keys.length > 1 ? [swatch, key.match(/chosen|rejected/)[0] + " "] : [];
      return make("span", {}, ...name, point ? number(point[1]) : "\u2013");
    }));
  };
  root.addEventListener("pointermove", event => {
    const box = root.getBoundingClientRect(), mouse = (event.clientX - box.left) / box.width * width;
    const near = step => Math.abs(x(step) - mouse);
    show(steps.reduce((best, step, index) => near(step) < near(steps[best]) ? index : best, 0), true);
  });
  root.addEventListener("keydown", event => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to, true);
  });
  for (const leave of ["pointerleave", "blur"])
    root.addEventListener(leave, () => show(steps.length - 1, false));
  show(at, false);
  return make("figure", {}, make("figcaption", {}, title), legend, root);
}

// Numbers that show what was learned come first; those on speed and memory are folded away.
const LEARNING = ["loss", "margin", "accuracy", "logp", "reward", "mean_drop"];
const RUNNING = ["grad_norm", "lr", "tokens_per_s", "peak_memory_mib"];

function stage(name, parts) {
  const groups = {}, side = /^(chosen|rejected)_|_(chosen|rejected)$/;
  const rows = parts.flatMap(part => part.rows), unit = name === "stages" ? "stage" : "step";
  for (const key of new Set(rows.flatMap(Object.keys))) {
    if (key === "step" || rows.filter(row => isNumber(row[key])).length < 2) continue;  // one point is no curve
    (groups[key.replace(side, "")] ??= []).push(key);
  }
  const draw = titles => make("div", { className: "charts" }, ...titles.map(title =>
    chart(title === "logp" ? "log-prob" : words(title), groups[title], parts, unit)));
  const known = title => LEARNING.includes(title) || RUNNING.includes(title);
  const shown = [...LEARNING.filter(title => groups[title]), ...Object.keys(groups).filter(t => !known(t))];
  const folded = RUNNING.filter(title => groups[title]);
  const times = parts.length > 1 ? `, rounds ${parts[0].round}\u2013${parts.at(-1).round}` : "";
  return make("section", {}, make("h3", {}, name + times), draw(shown), folded.length
    ? make("details", {}, make("summary", {}, "learning rate, gradient norm, speed, memory"), draw(folded)) : null);
}

// {"sft": rows, "dpo": rows, "dpo-2": rows} gives a section for SFT and one for both rounds of DPO.
function training(curves) {
  const stages = {};
  for (const [name, rows] of Object.entries(curves)) {
    if (!rows.length) continue;
    const parts = stages[name.replace(/-\d+$/, "")] ??= [], last = parts.at(-1);
    parts.push({ round: parts.length + 1, rows, offset: last ? last.offset + last.rows.at(-1).step : 0 });
  }
  return Object.entries(stages).map(([name, parts]) => stage(name, parts))
    .filter(section => section.querySelector("figure"));
}
