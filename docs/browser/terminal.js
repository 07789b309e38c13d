// What a terminal shows, as elements: text with the colours and weights that SGR sequences name.

const NAMES = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

export function plain(text) {
  return text.replace(/\x1b\[[0-9;]*m/g, "").replace(/\x1b\]8;[^\x1b]*\x1b\\/g, "");
}

export function show(text, into) {
  into.replaceChildren();
  const style = { bold: false, dim: false, italic: false, underline: false, colour: "", back: "" };
  const parts = text.replace(/\x1b\]8;[^\x1b]*\x1b\\/g, "").split(/\x1b\[([0-9;]*)m/);
  parts.forEach((part, position) => {
    if (position % 2) apply(style, part);
    else if (part) into.append(piece(part, style));
  });
}

function apply(style, codes) {
  const numbers = codes === "" ? [0] : codes.split(";").map(Number);
  for (let i = 0; i < numbers.length; i++) {
    const n = numbers[i];
    if (n === 0) Object.assign(style, { bold: false, dim: false, italic: false, underline: false, colour: "", back: "" });
    else if (n === 1) style.bold = true;
    else if (n === 2) style.dim = true;
    else if (n === 3) style.italic = true;
    else if (n === 4) style.underline = true;
    else if (n === 22) style.bold = style.dim = false;
    else if (n === 23) style.italic = false;
    else if (n === 24) style.underline = false;
    else if (n >= 30 && n <= 37) style.colour = NAMES[n - 30];
    else if (n >= 90 && n <= 97) style.colour = NAMES[n - 90];
    else if (n === 39) style.colour = "";
    else if (n >= 40 && n <= 47) style.back = NAMES[n - 40];
    else if (n === 49) style.back = "";
    else if (n === 38 || n === 48) {
      const name = numbers[i + 1] === 5 && numbers[i + 2] < 16 ? NAMES[numbers[i + 2] % 8] : "";
      style[n === 38 ? "colour" : "back"] = name;
      i += numbers[i + 1] === 5 ? 2 : 4;
    }
  }
}

function piece(text, style) {
  const names = ["bold", "dim", "italic", "underline"].filter((name) => style[name]);
  if (style.colour) names.push(`ink-${style.colour}`);
  if (style.back) names.push(`back-${style.back}`);
  if (!names.length) return document.createTextNode(text);
  const span = document.createElement("span");
  span.className = names.join(" ");
  span.textContent = text;
  return span;
}
