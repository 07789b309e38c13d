// The page: fields make a command line, the worker answers it, the tabs ask for the same setup in other ways.
import { fromHash, join, split, toHash } from "./words.js";
import { plain, show } from "./terminal.js";

const form = document.querySelector("#question");
const field = form.elements;
const screen = document.querySelector("#screen");
const report = document.querySelector("#report");
const verdict = document.querySelector("#verdict");
const state = document.querySelector("#state");
const tabs = [...document.querySelectorAll("[role=tab]")];
const NARROWEST = 40, WIDEST = 160, MOST_LEADING = 3;
const ONLY_ESTIMATE = ["--reserved", "--least", "--check", "--fail-on", "--cpu-memory"];

let files = {};
let asked = null; // the words of the question shown
let view = "answer";
const answers = new Map();

// The worker, as a function of a question.
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let number = 0;
let settle;
const loaded = new Promise((resolve, reject) => (settle = { resolve, reject }));
worker.onerror = (event) => settle.reject(new Error(event.message || "the worker could not be started"));
worker.onmessage = ({ data }) => {
  if (data.kind === "ready") settle.resolve(data.needed);
  else if (data.kind === "broken") settle.reject(new Error(data.text));
  else {
    waiting.get(data.id)(data);
    waiting.delete(data.id);
  }
};

// The second time it works without a network: what was needed to come up is kept.
async function stay(needed) {
  if (!("serviceWorker" in navigator)) return;
  await navigator.serviceWorker.register(new URL("../offline.js", import.meta.url));
  const { active } = await navigator.serviceWorker.ready;
  const own = performance.getEntriesByType("resource").map((each) => each.name);
  const channel = new MessageChannel();
  channel.port1.onmessage = ({ data }) => (document.documentElement.dataset.offline = data.kind);
  // Modules that scripts import are no resources of the page's in every browser.
  const modules = ["page.js", "worker.js", "words.js", "terminal.js", "runtime/pyodide.mjs", "runtime/pyodide.asm.mjs"];
  const imported = modules.map((name) => new URL(name, import.meta.url).href);
  const addresses = [location.href, ...imported, ...own, ...needed];
  active.postMessage({ kind: "keep", addresses }, [channel.port2]);
}

// What answers stands above the form too: on a phone the rest is a long way down.
function lead(text) {
  const lines = plain(text).split("\n");
  const job = lines.findIndex((line) => line.includes(" · ") || !line.trim());
  const told = lines.slice(0, Math.min(job < 0 ? 1 : job, MOST_LEADING));
  // No figure is broken at its dash: where it is narrow, what is needed has a line of its own.
  const narrow = matchMedia("(max-width: 30rem)").matches;
  verdict.textContent = told.map((line) => (narrow ? line.replace(/(\S) {3,}/, "$1\n  ") : line)).join("\n");
}

export async function ask(args, { columns = 100, colour = false, beside = files } = {}) {
  await loaded;
  const id = ++number;
  const answered = new Promise((resolve) => waiting.set(id, resolve));
  worker.postMessage({ id, args, files: beside, columns, colour });
  return answered;
}

// Fields to command line.
function composed() {
  const value = (name) => field[name].value.trim();
  const words = ["memplan", "estimate", value("model") || "t5-3b"];
  for (const name of ["gpus", "gpu", "engine", "zero", "batch-size", "seq-len", "precision", "checkpointing"]) {
    if (value(name)) words.push(`--${name}`, value(name));
  }
  if (value("lora")) words.push("--lora", "16", ...(value("lora") === "nf4" ? ["--quantize", "nf4"] : []));
  return join(words);
}

// Command line to fields, as far as they say it.
function reflect(words) {
  if (words[0] !== "estimate") return;
  const given = (name) => {
    const at = words.indexOf(`--${name}`);
    return at < 0 ? "" : (words[at + 1] ?? "");
  };
  field.model.value = words[1]?.startsWith("-") ? "" : (words[1] ?? "");
  for (const name of ["gpus", "gpu", "engine", "zero", "batch-size", "seq-len", "precision", "checkpointing"]) {
    field[name].value = given(name);
  }
  field.lora.value = given("lora") ? (given("quantize") === "nf4" ? "nf4" : "16") : "";
}

function columns() {
  const probe = document.createElement("span");
  probe.textContent = "0".repeat(100);
  probe.style.cssText = "position:absolute;visibility:hidden";
  screen.parentElement.hidden = false;
  screen.append(probe);
  const width = probe.getBoundingClientRect().width / 100;
  probe.remove();
  const style = getComputedStyle(screen);
  const room = screen.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return Math.max(NARROWEST, Math.min(WIDEST, Math.floor(room / width)));
}

// The same setup as another command.
function wordsOf(name) {
  if (name === "answer") return asked;
  if (name === "json") return [...without(asked, ["--format"]), "--format", "json"];
  const setup = without(asked, ["--format", ...ONLY_ESTIMATE]).slice(1);
  return ["explain", ...setup, ...(name === "report" ? ["--report", "report.html"] : [])];
}

function without(words, names) {
  const kept = [];
  for (let i = 0; i < words.length; i++) {
    if (!names.includes(words[i].split("=")[0])) kept.push(words[i]);
    else if (!words[i].includes("=") && words[i + 1] && !words[i + 1].startsWith("-")) i += 1;
  }
  return kept;
}

async function run(line) {
  let words;
  try {
    words = split(line);
  } catch (error) {
    return fail(`memplan: error: ${error.message}`);
  }
  asked = words;
  answers.clear();
  const explained = words[0] === "estimate" || words[0] === "explain";
  for (const tab of tabs) tab.hidden = !explained && (tab.dataset.view === "why" || tab.dataset.view === "report");
  if (tabs.find((tab) => tab.dataset.view === view).hidden) view = "answer";
  history.replaceState(null, "", await toHash(join(["memplan", ...words]), files));
  await look(view);
}

async function look(name) {
  view = name;
  for (const tab of tabs) tab.setAttribute("aria-selected", String(tab.dataset.view === name));
  if (!asked) return;
  const question = asked;
  state.textContent = "working …";
  form.classList.add("busy");
  if (!answers.has(name)) answers.set(name, await ask(wordsOf(name), { columns: columns(), colour: name !== "json" }));
  form.classList.remove("busy");
  if (question !== asked || view !== name) return;
  const found = answers.get(name);
  const page = name === "report" && Object.entries(found.texts).find(([path]) => path.endsWith(".html"))?.[1];
  offer(found);
  report.hidden = !page;
  screen.hidden = Boolean(page);
  if (page) report.srcdoc = page;
  show([found.err, found.out].filter(Boolean).join(found.out ? "\n" : ""), screen);
  if (name === "answer") lead(found.out || found.err);
  screen.classList.toggle("failed", found.code !== 0);
  state.textContent = `${found.seconds ? `${found.seconds.toFixed(2)} s here` : "ready"}${found.code ? `, exit code ${found.code}` : ""}`;
  document.documentElement.dataset.answered = `${name}:${found.code}`;
}

// There is no disk: what a command wrote is a download.
let offered = [];
function offer({ texts, others }) {
  offered.forEach((address) => URL.revokeObjectURL(address));
  const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const found = [...Object.entries(texts), ...Object.entries(others).map(([path, text]) => [path, bytes(text)])];
  const links = found.map(([path, content]) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content]));
    link.download = path.split(/[\\/]/).pop();
    link.textContent = `Download ${path}`;
    return link;
  });
  offered = links.map((link) => link.href);
  document.querySelector("#written").replaceChildren(...links);
}

function fail(text) {
  screen.parentElement.hidden = false;
  screen.hidden = false;
  report.hidden = true;
  offer({ texts: {}, others: {} });
  screen.textContent = text;
  lead(text);
  screen.classList.add("failed");
}

function fit() {
  field.line.style.height = "auto";
  field.line.style.height = `${field.line.scrollHeight}px`;
}

function setLine(line) {
  field.line.value = line;
  fit();
}

function keep() {
  document.querySelector("#kept").replaceChildren(
    ...Object.keys(files).map((name) => {
      const row = document.createElement("li");
      const drop = document.createElement("button");
      drop.type = "button";
      drop.textContent = "remove";
      drop.setAttribute("aria-label", `remove ${name}`);
      drop.onclick = () => {
        delete files[name];
        if (name === "config.json") field.config.value = "";
        keep();
      };
      row.append(`${name} `, drop);
      return row;
    }),
  );
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run(field.line.value);
});
form.addEventListener("input", (event) => {
  const name = event.target.name;
  if (name === "line") {
    fit();
    try {
      reflect(split(field.line.value));
    } catch {
      // A quote that is still open: the fields wait.
    }
  } else if (name === "config") {
    const text = field.config.value.trim();
    if (text) files["config.json"] = text;
    else delete files["config.json"];
    if (text) field.model.value = "config.json";
    keep();
    setLine(composed());
  } else if (name !== "files") setLine(composed());
});
field.files.addEventListener("change", async () => {
  await add(field.files.files);
  field.files.value = "";
});

// Files stay on this machine: they are read here, and go into the question.
async function add(chosen) {
  for (const each of chosen) files[each.name] = await each.text();
  if (files["config.json"]) {
    field.config.value = files["config.json"];
    field.model.value = "config.json";
    setLine(composed());
  }
  keep();
}

for (const kind of ["dragenter", "dragover"]) {
  form.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    form.classList.add("over");
  });
}
form.addEventListener("dragleave", (event) => {
  if (!form.contains(event.relatedTarget)) form.classList.remove("over");
});
form.addEventListener("drop", async (event) => {
  if (!event.dataTransfer?.files.length) return;
  event.preventDefault();
  form.classList.remove("over");
  document.querySelector("#own").open = true;
  await add(event.dataTransfer.files);
  await loaded;
  form.requestSubmit();
});
field.line.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    form.requestSubmit();
  }
});
form.querySelector(".plan").onclick = () => {
  const words = split(field.line.value).slice(1);
  const kept = without(words, ["--engine", "--zero", "--checkpointing", "--batch-size", "--precision", "--format"]);
  const named = kept.some((word) => word.startsWith("--gpu") && !word.startsWith("--gpus"));
  setLine(join(["memplan", "plan", ...kept, ...(named ? [] : ["--gpu", "h100"])]));
  form.requestSubmit();
};
form.querySelector(".copy-command").onclick = async (event) => {
  try {
    await navigator.clipboard.writeText(field.line.value);
    event.target.textContent = "Copied";
    setTimeout(() => (event.target.textContent = "Copy the command"), 2000);
  } catch {
    field.line.select();
  }
};
form.querySelector(".copy").onclick = async (event) => {
  const link = new URL(await toHash(field.line.value, files), location.href).href;
  try {
    await navigator.clipboard.writeText(link);
    event.target.textContent = "Copied";
    setTimeout(() => (event.target.textContent = "Copy a link to this question"), 2000);
  } catch {
    prompt("The link:", link);
  }
};
for (const tab of tabs) tab.onclick = () => look(tab.dataset.view);
document.querySelector("#answer [role=tablist]").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const shown = tabs.filter((tab) => !tab.hidden);
  const at = shown.indexOf(event.target);
  if (step && at >= 0) {
    const next = shown[(at + step + shown.length) % shown.length];
    next.focus();
    next.click();
  }
});

async function names(list, args, key) {
  const found = await ask(args, { beside: {} });
  const rows = JSON.parse(plain(found.out));
  document.querySelector(list).replaceChildren(
    ...(rows.rows ?? rows).map((row) => Object.assign(document.createElement("option"), { value: row[key] })),
  );
}

async function take() {
  const question = await fromHash(location.hash);
  files = question.files;
  field.config.value = files["config.json"] ?? "";
  document.querySelector("#own").open = Object.keys(files).length > 0;
  keep();
  setLine(question.line || composed());
  reflect(split(field.line.value));
  if (question.line) return run(field.line.value);
  // The usual question is answered already: it is asked again when a tab wants more of it.
  asked = split(field.line.value);
  answers.set("answer", { code: 0, out: screen.textContent, err: "", texts: {}, others: {}, seconds: 0 });
  state.textContent = "ready";
}

for (const [id, owner] of [["models", field.model], ["cards", field.gpu]]) {
  owner.after(Object.assign(document.createElement("datalist"), { id }));
}
setLine(composed());
// What stands there beforehand answers the usual question alone.
if (location.hash.length > 1) screen.parentElement.hidden = true;
else lead(screen.textContent);
loaded.then(
  async (needed) => {
    const button = form.querySelector(".ask");
    button.textContent = "Estimate";
    button.disabled = form.querySelector(".plan").disabled = false;
    await take();
    window.addEventListener("hashchange", take);
    await names("#models", ["models", "--format", "json"], "name");
    await names("#cards", ["gpus", "--format", "json"], "name");
    await stay(needed);
  },
  (error) => {
    form.querySelector(".ask").textContent = "Python could not be loaded";
    fail(`Python could not be loaded: ${error.message}`);
  },
);
window.memplan = { ask };
