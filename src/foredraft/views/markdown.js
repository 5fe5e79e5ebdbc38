// Small Markdown renderer: headings, lists, quotes, rules, fenced code, and within lines code, bold and italics. It
// builds nodes and never parses HTML, so that markup in an answer is shown as text. Line breaks and indents are kept.
const MAX_DEPTH = 16;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/, HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/, QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/, ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const INLINE = new RegExp([
  "(?<!`)(?<ticks>`+)(?!`)(?<code>[^]{1,2000}?)(?<!`)\\k<ticks>(?!`)",
  "\\\\(?<escaped>[!-/:-@[-`{-~])",
  "\\*\\*(?=\\S)(?<bold>[^]{0,1000}?\\S)\\*\\*(?!\\*)",
  "(?<![\\p{L}\\p{N}_])__(?=\\S)(?<strong>[^]{0,1000}?\\S)__(?![\\p{L}\\p{N}_])",
  "\\*(?=[^\\s*])(?<italic>[^]{0,1000}?[^\\s*])\\*(?!\\*)",
  "(?<![\\p{L}\\p{N}_])_(?=[^\\s_])(?<slanted>[^]{0,1000}?[^\\s_])_(?![\\p{L}\\p{N}_])",
].join("|"), "gu");

function rendered(markdown) {
  const into = document.createDocumentFragment();
  addBlocks(into, markdown.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
  return into;
}

function addBlocks(into, lines, depth) {
  for (let place = 0; place < lines.length;) {
    const line = lines[place];
    if (!line.trim()) place += 1;
    else if (FENCE.test(line)) place = addCode(into, lines, place);
    else if (HEADING.test(line)) {
      const [, marks, text] = HEADING.exec(line);
      addInline(append(into, `h${Math.min(6, marks.length + 2)}`), text.replace(/ +#* *$/, ""));
      place += 1;
    } else if (RULE.test(line)) {
      append(into, "hr");
      place += 1;
    } else if (depth < MAX_DEPTH && QUOTE.test(line)) {
      const start = place;
      while (place < lines.length && QUOTE.test(lines[place])) place += 1;
      addBlocks(append(into, "blockquote"), lines.slice(start, place).map((one) => one.replace(QUOTE, "")), depth + 1);
    } else if (depth < MAX_DEPTH && ITEM.test(line)) place = addList(into, lines, place, depth);
    else {
      const start = place;
      do place += 1; while (place < lines.length && lines[place].trim() && !startsBlock(lines[place]));
      addInline(append(into, "p"), lines.slice(start, place).map((one) => one.trimEnd()).join("\n"));
    }
  }
}

function startsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((start) => start.test(line));
}

function append(into, name) {
  const element = document.createElement(name);
  into.append(element);
  return element;
}

// Code up to the closing fence, or up to the end while the answer is still being written.
function addCode(into, lines, place) {
  const indent = /^ */.exec(lines[place])[0].length, [, fence, language] = FENCE.exec(lines[place]);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`), start = place + 1;
  do place += 1; while (place < lines.length && !closing.test(lines[place]));
  const block = append(into, "pre"), code = append(block, "code");
  block.tabIndex = 0;  // so that the keyboard can scroll it
  if (language) block.dataset.language = language;
  code.textContent = lines.slice(start, place).map((one) => one.replace(new RegExp(`^ {0,${indent}}`), "")).join("\n");
  return place + 1;
}

// List of items with the same kind of mark. The lines of an item are indented to its text; lines that continue its
// paragraph need no indent.
function addList(into, lines, place, depth) {
  const first = ITEM.exec(lines[place]), isOrdered = /\d/.test(first[2]), list = append(into, isOrdered ? "ol" : "ul");
  const kindOf = (mark) => mark.at(-1);
  if (isOrdered) list.start = parseInt(first[2], 10);
  while (place < lines.length) {
    const item = ITEM.exec(lines[place]);
    if (!item || RULE.test(lines[place]) || kindOf(item[2]) !== kindOf(first[2])) break;
    if (item[1].length < first[1].length) break;
    const width = item[1].length + item[2].length + Math.min(4, item[3].length || 1);
    const inner = [lines[place].slice(width)];
    for (place += 1; place < lines.length; place += 1) {
      const line = lines[place], indent = line.search(/\S/);
      if (indent >= width || (indent > item[1].length + 1 && ITEM.test(line))) {
        inner.push(line.slice(Math.min(indent, width)));
      } else if (indent < 0) {
        const next = lines.slice(place).find((one) => one.trim());
        if (next === undefined || next.search(/\S/) < width) break;
        inner.push("");
      } else if (!inner.at(-1).trim() || startsBlock(line)) break;
      else inner.push(line.trim());
    }
    addBlocks(append(list, "li"), inner, depth + 1);
    const next = lines.findIndex((line, other) => other >= place && line.trim());  // blank lines between two items
    if (next > place && ITEM.test(lines[next])) place = next;
  }
  return place;
}

function addInline(into, text) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    into.append(text.slice(end, found.index));
    end = found.index + found[0].length;
    const { code, escaped, bold, strong, italic, slanted } = found.groups;
    if (code !== undefined) append(into, "code").textContent = /^ .*\S.* $/s.test(code) ? code.slice(1, -1) : code;
    else if (escaped !== undefined) into.append(escaped);
    else addInline(append(into, bold ?? strong ? "strong" : "em"), bold ?? strong ?? italic ?? slanted);
  }
  into.append(text.slice(end));
}
