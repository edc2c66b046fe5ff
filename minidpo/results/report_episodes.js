// Episodes, step by step: the agents side by side on one instance. Read report_tokens.js next.

// Frames around the elements that an action uses, clipped to the picture. A point gets a ring.
function marks(boxes, [across, down]) {
  return boxes.flatMap(([left, top, width, height]) => {
    const edge = width && height ? 2 : 6, clip = (value, most) => Math.max(0, Math.min(most, value));
    const [x1, x2] = [left - edge, left + width + edge].map(x => clip(x, across));
    const [y1, y2] = [top - edge, top + height + edge].map(y => clip(y, down));
    if (x1 === x2 || y1 === y2) return [];
    const mark = make("i", { className: width && height ? "mark" : "mark ring" });
    Object.assign(mark.style, { left: `${100 * x1 / across}%`, top: `${100 * y1 / down}%`,
      width: `${100 * (x2 - x1) / across}%`, height: `${100 * (y2 - y1) / down}%` });
    return [mark];
  });
}

const mood = outcome => outcome === "solved" ? "good" : "bad";

// One agent at one step. After its last step it shows the end, even if other agents have more steps.
function pane(policy, run, { pictures, size }, step, reading) {
  const turn = run.turns[step], picture = turn ? turn.picture : run.final, boxes = turn ? turn.marks : [];
  const drawn = size ? marks(boxes, size) : [], place = turn ? `before step ${step + 1}` : "at the end";
  const shot = size ? make("div", { className: "shot" }) : null;
  if (size) shot.style.aspectRatio = `${size[0]} / ${size[1]}`;
  if (isNumber(picture)) shot.append(make("img", { src: `data:image/png;base64,${pictures[picture]}`,
    width: size[0], height: size[1], alt: `${policy}: the page ${place}` }), ...drawn);
  const said = make("div", { className: "said" });
  const tell = (kind, text) => text && said.append(make("p", { className: "small " + kind }, text));
  const steps = `${run.turns.length} step${run.turns.length === 1 ? "" : "s"}`;
  if (turn) {
    // set at the click, because the "toggle" event may come after the next key press
    const read = make("details", { open: reading.open },
      make("summary", { onclick: () => reading.open = !read.open }, "what the agent read"),
      make("pre", {}, turn.observation));
    tell("soft", `step ${step + 1} of ${run.turns.length}`);
    if (!size) said.append(read);  // without pictures the observation comes first, as it did for the agent
    if (turn.action) tell("thought", turn.thought);  // else the whole answer is shown
    said.append(make("code", { className: "action" }, turn.action ?? turn.answer));
    tell("soft", boxes.length && !drawn.length && "The element it used is outside the picture.");
    tell("bad", turn.error);
    if (size) said.append(read);
  } else {
    tell("soft", "the end");
    tell(mood(run.outcome), `${run.outcome} after ${steps}, reward ${number(run.reward)}`);
  }
  return make("section", {}, make("h3", {}, policy,
    make("span", { className: "tag " + mood(run.outcome) }, `${run.outcome}, ${steps}`)),
    make("div", { className: size ? "pane" : "" }, shot, said));
}

function viewer(instances) {
  const policies = data.policies.filter(policy => policy in instances[0].episodes);
  const tasks = [...new Set(instances.map(instance => instance.task))].sort();
  // whether observations are unfolded, kept from step to step; open at first if there are no pictures
  const reading = { open: !instances.some(instance => instance.size) };
  let current = instances[0], step = 0, shown = policies;
  const kind = ({ episodes }) => {
    const solved = policies.filter(policy => episodes[policy].outcome === "solved");
    const many = policies.length > 2;
    if (policies.length === 1) return solved.length ? "solved" : "not solved";
    if (!solved.length) return `${many ? "none" : "neither"} solved it`;
    if (solved.length === policies.length) return `${many ? "all" : "both"} solved it`;
    return `only ${solved.join(" and ")} solved it`;
  };
  const instancesOf = task => instances.filter(instance => instance.task === task);

  const task = chooser("Task", tasks, index => open(instancesOf(tasks[index])[0]));
  const instance = chooser("Instance", [], index => open(instancesOf(current.task)[index]));
  const agent = chooser("Agent", ["all, side by side", ...policies], index => {
    shown = index ? [policies[index - 1]] : policies;
    draw();
  });
  const go = to => {
    step = Math.max(0, Math.min(length(), to));
    draw();
  };
  const button = (text, name, by) => make("button", { type: "button", ariaLabel: name,
    onclick: () => go(step + by) }, text);
  const back = button("\u2190 previous", "previous step", -1), next = button("next \u2192", "next step", 1);
  const slide = make("input", { type: "range", min: 0, ariaLabel: "step", oninput: () => go(+slide.value) });
  const where = make("output", { className: "small num" });
  const asked = make("blockquote"), panes = make("div", { className: "episodes" });
  const length = () => Math.max(...shown.map(policy => current.episodes[policy].turns.length));

  const draw = () => {
    step = Math.min(step, length());
    slide.max = length();
    slide.value = step;
    where.value = step < length() ? `step ${step + 1} of ${length()}` : "the end";
    back.ariaDisabled = step === 0;
    next.ariaDisabled = step === length();
    panes.replaceChildren(...shown.map(policy =>
      pane(policy, current.episodes[policy], current,
        Math.min(step, current.episodes[policy].turns.length), reading)));
    const hash = `#${encodeURIComponent(current.task)}/${current.seed}/${step + 1}`;
    if (drawnBefore && /^(file|http)/.test(location.protocol)) history.replaceState(null, "", hash);
    drawnBefore = true;  // the address stays as opened until the reader does something
  };
  const open = (which, at = 0) => {
    [current, step] = [which, at];
    task.select.selectedIndex = tasks.indexOf(current.task);
    instance.fill(instancesOf(current.task).map(each => `seed ${each.seed}, ${kind(each)}`));
    instance.select.selectedIndex = instancesOf(current.task).indexOf(current);
    asked.textContent = current.instruction;
    draw();
  };
  const follow = () => {  // open the instance and step that the address names
    const [name, seed, at] = location.hash.slice(1).split("/");
    const found = instances.find(each => encodeURIComponent(each.task) === name && each.seed === +seed);
    if (found) open(found, Math.max(0, (+at || 1) - 1));
    return found;
  };
  let drawnBefore = false;
  document.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const elsewhere = event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey;
    if (!by || elsewhere || event.target.closest("input, select")) return;
    go(step + by);
  });
  addEventListener("hashchange", follow);
  const section = make("div", { id: "viewer" },
    make("div", { className: "controls" }, task.box, instance.box, policies.length > 1 ? agent.box : null),
    asked, make("div", { className: "stepper" }, back, slide, where, next), panes);
  if (follow()) addEventListener("load", () => section.scrollIntoView());
  else open(current);
  return section;
}

// Says which episodes are shown.
function chosenEpisodes(instances, played) {
  const only = (winner, loser) => `that ${winner} solved and ${loser} did not`;
  const [before, last] = policies.slice(-2);
  const kinds = policies.length === 1 ? ["that was not solved", "that was solved"]
    : [only(last, before), only(before, last), "that neither solved", "that both solved"];
  const pictures = instances.some(instance => instance.size)
    ? "The picture shows the page before the step, with a frame around the element used. " : "";
  const [some, all] = [instances.length, played].map(count => count.toLocaleString("en"));
  return `These are ${some} of the ${all} instances played: of each task the first ${kinds.join(", ")}, ` +
    `then the second of each kind, and so on. ${pictures}The left and right arrow keys also step.`;
}
