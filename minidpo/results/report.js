// Drawing helpers, the headline and the table of tasks. Read report_curves.js next.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");

// Strings become text nodes here and nowhere else, so text from a web page is never read as markup.
const make = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
};
const svg = (tag, attributes = {}, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  node.textContent = text;
  return node;
};
// A labelled drop-down list; `choose` is called with the index of the chosen option.
const chooser = (name, options, choose) => {
  const select = make("select", { onchange: () => choose(select.selectedIndex) });
  const fill = texts => select.replaceChildren(...texts.map(text => make("option", {}, text)));
  fill(options);
  return { box: make("label", {}, make("span", {}, name), select), select, fill };
};

const colours = ["var(--a)", "var(--b)", "var(--c)", "var(--good)", "var(--bad)"];
const words = name => name.replaceAll("_", " ");
const minus = text => text.replace("-", "\u2212");
// Python's rounding (a tie goes to the even digit): the printed table and this page agree to the last digit.
const fixed = (value, digits) => {
  const text = value.toFixed(digits), tie = Math.abs(value * 2 ** (digits + 1)) % 2 === 1;
  return tie && "13579".includes(text.at(-1)) ? (value * (1 - 1e-9)).toFixed(digits) : text;
};
const percent = fraction => fixed(100 * fraction, 1) + "\u2009%";
const interval = row => `${fixed(100 * row.low, 1)}\u2013${fixed(100 * row.high, 1)}`;
const signed = points => minus((points < 0 ? "" : "+") + fixed(points, 1));
const isNumber = value => typeof value === "number";
const number = value => {
  const size = Math.abs(value);
  if (size >= 1e5) return minus(Intl.NumberFormat("en", { notation: "compact" }).format(value));
  if (size > 0 && size < 1e-3) return minus(value.toExponential(1).replace(".0", ""));
  return minus(String(+value.toPrecision(4)));
};
const probability = p => {
  if (p >= 0.001) return "= " + p.toPrecision(2);
  if (p === 0) return "< 10\u207b\u00b3\u2070\u2070";
  const [mantissa, exponent] = p.toExponential(1).split("e-");
  return `= ${mantissa}\u00b710\u207b${[...exponent].map(digit => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
};

function headline(results, policies) {
  const last = policies.at(-1), before = policies.at(-2);
  const { best_of: tries, temperature, judge } = data.settings;
  const rate = policy => make("span", {},
    make("strong", { className: "num" }, percent(results[policy].all.success)), " (",
    make("span", { className: "num soft" }, interval(results[policy].all)), ")");
  const which = data.settings.split === "validation" ? "validation" : "held-out";
  const of = policy => `${results[policy].all.n.toLocaleString("en")} ${which} instances`;
  const text = make("p", {}, last, " solves ", rate(last), " of ", of(last));
  if (before) text.append(" and ", before, " ", rate(before), " of ",
    results[before].all.n === results[last].all.n ? "the same ones" : of(before));
  if (isNumber(data.p_value)) text.append("; exact McNemar test, ", make("em", {}, "p"), " ",
    make("span", { className: "num", id: "p-value" }, probability(data.p_value)));
  text.append(".");
  const who = judge ? `The reward model ${judge}` : "The world's verdict";
  if (tries > 1) text.append(` ${who} chose ` +
    `the best of ${tries} tries at temperature ${number(temperature)}` +
    (judge ? "." : ", so this is the success of an oracle, not of the agent alone."));
  const gain = isNumber(data.gain_points) ? make("div", { className: "gain num" },
    make("span", { id: "gain" }, signed(data.gain_points)), make("small", {}, "points")) : null;
  return make("div", { className: "headline" }, gain, text);
}

// With three agents or more, each is compared with the one before it.
function compared(comparisons) {
  return comparisons.map(({ before, after, gain_points, p_value, only_after, only_before, n }) =>
    make("p", { className: "note compared" }, `${after} compared with ${before}: ` +
      `${signed(gain_points)} points on the same ${n.toLocaleString("en")} instances (${only_after} won, ` +
      `${only_before} lost), exact McNemar p ${probability(p_value)}`));
}

// A row for each name that any agent has under this key, and a column for each agent.
function table(id, title, key, text, policies, results) {
  const names = [...new Set(policies.flatMap(policy => Object.keys(results[policy][key] ?? {})))];
  if (!names.length) return "";
  const cells = name => policies.map(policy => {
    const td = make("td", { className: "num" }, text(results[policy][key]?.[name]));
    td.dataset.label = policy;
    return td;
  });
  return make("table", { id, className: "small" },
    make("thead", {}, make("tr", {}, make("th", {}, title),
      ...policies.map(policy => make("th", { className: "num" }, policy)))),
    make("tbody", {}, ...names.map(name => make("tr", {}, make("th", {}, name), ...cells(name)))));
}

// How many episodes of each agent failed, by cause.
const causeTable = (results, policies) =>
  table("causes", "failed episodes by cause", "causes", count => count ?? 0, policies, results);

// Success by how many elements of the first page can be used.
const difficultyTable = (results, policies) => {
  const bands = new Set(policies.flatMap(policy => Object.keys(results[policy].difficulty ?? {})));
  return bands.size < 2 ? "" :  // a text world has no elements
    table("difficulty", "success by number of usable elements", "difficulty",
      row => row ? `${percent(row.success)} of ${row.n}` : "\u2013", policies, results);
};

function taskTable(results, policies) {
  const cell = (name, text) => {
    const td = make("td", { className: "num" }, text);
    td.dataset.label = name;
    return td;
  };
  const line = (policy, row) => {
    const bar = make("i"), whisker = make("b");
    bar.style.width = `${100 * row.success}%`;
    bar.style.background = colours[policies.indexOf(policy) % colours.length];
    whisker.style.left = `${100 * row.low}%`;
    whisker.style.width = `${100 * (row.high - row.low)}%`;
    return make("tr", {}, make("td", { className: "policy" }, policy),
      make("td", { className: "bars" }, make("div", { className: "bar" }, bar, whisker)),
      make("td", { className: "num success" }, percent(row.success)), cell("95\u2009%", interval(row)),
      cell("n", row.n), cell("reward", "mean_reward" in row ? fixed(row.mean_reward, 2) : "\u2013"),
      cell("steps", fixed(row.mean_steps, 2)),
      cell("valid", percent(row.valid_action_rate)));
  };
  const group = (name, rowOf) => {
    const [before, last] = policies.slice(-2).map(rowOf);  // undefined if the agent has no episode of the task
    const lines = policies.filter(rowOf).map(policy => line(policy, rowOf(policy)));
    const gain = before && last ? make("span", {}, signed(100 * (last.success - before.success))) : null;
    lines[0].prepend(make("th", { rowSpan: lines.length }, name, gain));
    return make("tbody", {}, ...lines);
  };
  const scale = make("div", { className: "scale" });
  scale.append(...["0", "50", "100\u2009%"].map(mark => make("span", {}, mark)));
  const heads = ["success", "95\u2009% interval", "n", "reward", "steps", "valid"].map(
    head => make("th", { className: "num" }, head));
  const tasks = [...new Set(policies.flatMap(policy => Object.keys(results[policy].tasks)))];
  return make("table", { id: "tasks" },
    make("thead", {}, make("tr", {}, make("th"), make("th"), make("th", {}, scale), ...heads)),
    group("all tasks", policy => results[policy].all),
    ...(policies.every(policy => results[policy].new)
      ? [group("all new pages", policy => results[policy].new)] : []),
    ...(policies.every(policy => results[policy].sampled)
      ? [group("all, at temperature 1", policy => results[policy].sampled)] : []),
    ...tasks.map(task => group(task, policy => results[policy].tasks[task])));
}
