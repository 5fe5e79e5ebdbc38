function marked(text, source, first, rejected) {
  const token = document.createElement("span");
  token.className = "token" + (source === "target" ? "" : source === first ? " drafted" : " other");
  token.textContent = text;
  token.title = source;
  if (rejected.length) {
    token.classList.add("refused");
    token.tabIndex = 0;
    token.removeAttribute("title");
    const box = document.createElement("span");
    box.className = "branches";
    box.setAttribute("role", "note");
    for (const branch of rejected) {
      const line = document.createElement("div"), who = document.createElement("b"), what = document.createElement("s");
      who.textContent = branch.source + ": ";
      what.textContent = branch.text;
      line.append(who, what);
      box.append(line);
    }
    token.append(box);
  }
  return token;
}

// Return the tokens of one step. The last one is the model's own; after a draft it is the bonus token.
function tokensOf(step, first) {
  return step.texts.map((text, place) => {
    const source = step.sources[place] || "target", isLast = place === step.texts.length - 1;
    const token = marked(text, source, first, isLast ? step.rejected : []);
    if (source === "target" && step.num_drafted) token.classList.add("bonus");
    return token;
  });
}

// Show steps in `turn` and describe the newest in `told`. Arrow keys, Home and End move between steps.
function replay(turn, told, steps) {
  const drafters = steps.flatMap((step) => step.sources).filter((source) => source !== "target" && source !== "grammar");
  const spans = steps.map((step) => tokensOf(step, drafters[0]));
  let shown = steps.length;
  turn.classList.add("replay");
  turn.tabIndex = 0;
  turn.append(...spans.flat());
  function show(number) {
    shown = Math.max(0, Math.min(steps.length, number));
    spans.forEach((some, place) => some.forEach((span) => {
      span.classList.toggle("later", place >= shown);
      span.classList.toggle("now", place === shown - 1 && shown < steps.length);
    }));
    const step = steps[shown - 1];
    told.textContent = `step ${shown} of ${steps.length}` + (!step ? "" : step.num_drafted
      ? `: ${step.num_drafted} drafted, ${step.num_accepted} accepted, ${step.texts.length - step.num_accepted} by the model`
      : ": no draft");
  }
  turn.addEventListener("keydown", (event) => {
    const to = { ArrowRight: shown + 1, ArrowLeft: shown - 1, Home: 0, End: steps.length }[event.key];
    if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    show(to);
  });
  show(shown);
  return { forward: () => show(shown + 1), back: () => show(shown - 1) };
}
