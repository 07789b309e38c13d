// A command line as text and as words, the way a POSIX shell reads them.

export function split(line) {
  const words = [];
  let word = null;
  let quote = "";
  for (let i = 0; i < line.length; i++) {
    const c = line[i];
    if (quote) {
      if (c === quote) quote = "";
      else if (c === "\\" && quote === '"' && '"\\$`'.includes(line[i + 1])) word += line[++i];
      else word += c;
    } else if (c === "'" || c === '"') {
      quote = c;
      word ??= "";
    } else if (c === "\\" && i + 1 < line.length) {
      i += 1;
      if (line[i] !== "\n") word = (word ?? "") + line[i]; // a line that goes on
    } else if (/\s/.test(c)) {
      if (word !== null) words.push(word);
      word = null;
    } else word = (word ?? "") + c;
  }
  if (quote) throw new Error(`the quote ${quote} is not closed`);
  if (word !== null) words.push(word);
  return words[0] === "memplan" ? words.slice(1) : words;
}

export function join(words) {
  return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`)).join(" ");
}

// A question as the part of an address after #: the command, and files packed beside it.
export async function toHash(line, files) {
  const parts = [`q=${encodeURIComponent(line)}`];
  if (Object.keys(files).length) parts.push(`files=${await pack(JSON.stringify(files))}`);
  return `#${parts.join("&")}`;
}

export async function fromHash(hash) {
  const found = Object.fromEntries(new URLSearchParams(hash.replace(/^#/, "").replaceAll("+", "%2B")));
  return { line: found.q ?? "", files: found.files ? JSON.parse(await unpack(found.files)) : {} };
}

async function through(stream, bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}

async function pack(text) {
  const bytes = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(text));
  let binary = "";
  for (const each of bytes) binary += String.fromCharCode(each);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function unpack(text) {
  const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = await through(new DecompressionStream("deflate-raw"), Uint8Array.from(binary, (c) => c.charCodeAt(0)));
  return new TextDecoder().decode(bytes);
}
