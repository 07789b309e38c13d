// memplan in the browser: Python, the wheel and what it needs, all from beside this file.
import { loadPyodide } from "./runtime/pyodide.mjs";

const HERE = new URL("./runtime/", import.meta.url).href;

const ready = (async () => {
  const [python, packages] = await Promise.all([
    loadPyodide({ indexURL: HERE }),
    fetch(`${HERE}packages.zip`).then((found) => {
      if (!found.ok) throw new Error(`${found.url}: ${found.status}`);
      return found.arrayBuffer();
    }),
  ]);
  const place = python.runPython("import site; site.getsitepackages()[0]");
  python.unpackArchive(packages, "zip", { extractDir: place });
  return { python, answering: python.pyimport("answering") };
})();

// One question after another: a command has the process to itself.
let queue = ready.then(
  () => postMessage({ kind: "ready", needed: performance.getEntriesByType("resource").map((each) => each.name) }),
  (error) => postMessage({ kind: "broken", text: String(error) }),
);

onmessage = ({ data }) => {
  queue = queue.then(() => ask(data));
};

async function ask({ id, args, files, columns, colour }) {
  try {
    const { python, answering } = await ready;
    const began = performance.now();
    const found = answering.answer.callKwargs(python.toPy(args), python.toPy(files), { columns, colour });
    const [code, out, err, texts, others] = found.toJs({ dict_converter: Object.fromEntries });
    found.destroy();
    const seconds = (performance.now() - began) / 1000;
    postMessage({ kind: "answer", id, code, out, err, texts, others, seconds });
  } catch (error) {
    postMessage({ kind: "answer", id, code: 1, out: "", err: String(error), texts: {}, others: {}, seconds: 0 });
  }
}
