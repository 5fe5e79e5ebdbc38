// Colour of a source, from 1 to 6. A drafter has the same colour in every answer and on every page. If two drafters of
// one page would share a colour, the second one takes the next free colour.
const NUM_COLOURS = 6, PREFERRED = { suffix: 1, eagle3: 2, ngram: 3, draft_model: 4, prediction: 5, grammar: 6 };
const colours = new Map();
function colourOf(source) {
  if (colours.has(source)) return colours.get(source);
  const taken = new Set(colours.values()), sum = [...source].reduce((sum, letter) => sum + letter.charCodeAt(0), 0);
  let colour = Object.hasOwn(PREFERRED, source) ? PREFERRED[source] : sum % NUM_COLOURS + 1;
  while (taken.size < NUM_COLOURS && taken.has(colour)) colour = colour % NUM_COLOURS + 1;
  colours.set(source, colour);
  return colour;
}

function swatch(text, source) {
  const token = document.createElement("span");
  token.className = "token" + (source === "target" ? "" : ` drafted colour-${colourOf(source)}`);
  token.textContent = text;
  return token;
}

// Legend with the number of tokens from each source, the most first.
function legend(counts) {
  const line = document.createElement("div");
  line.className = "told legend";
  for (const [source, count] of [...counts].sort((one, other) => other[1] - one[1])) {
    line.append(swatch(`${source === "target" ? "the model itself" : source} ${count}`, source));
  }
  return line;
}

// Token with its source as title, and with the rejected branches that appear beside it.
function marked(text, source, rejected) {
  const token = swatch(text, source);
  token.title = source === "target" ? "the model itself" : source;
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
    const place = () => {  // moves the box into the window
      box.style.left = "0";
      const { left, right } = box.getBoundingClientRect(), end = document.documentElement.clientWidth - 8;
      box.style.left = `${Math.max(8 - left, Math.min(0, end - right))}px`;
    };
    token.addEventListener("mouseenter", place);
    token.addEventListener("focus", place);
  }
  return token;
}

// Return the tokens of one step. The last one is the model's own; after a draft it is the bonus token.
function tokensOf(step) {
  return step.texts.map((text, place) => {
    const source = step.sources[place] || "target", isLast = place === step.texts.length - 1;
    const token = marked(text, source, isLast ? step.rejected : []);
    if (source === "target" && step.num_drafted) token.classList.add("bonus");
    return token;
  });
}

// Show steps in `turn` and describe the newest in `told`. Arrow keys, Home and End move between steps.
function replay(turn, told, steps) {
  const spans = steps.map(tokensOf);
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
      ? `: ${step.num_drafted} drafted, ${step.num_accepted} accepted, ` +
        `${step.texts.length - step.num_accepted} by the model` : ": no draft");
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
