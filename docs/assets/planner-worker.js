// Runs planner.py by Pyodide, beside the page, so that the form never waits for it. Messages in: {id, call, args}, with
// `call` a function of planner.py and `args` its arguments; out: {id, value} or {id, error}, and once {ready: seconds}.
// A newer question makes the rest of an older one worthless, so calls are taken one at a time and can be forgotten.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const began = performance.now();
const beside = (name) => new URL(name, import.meta.url);
const bytes = async (name) => {
  const answer = await fetch(beside(name));
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer;
};

const start = async () => {
  const [python, program, source] = await Promise.all([
    loadPyodide({ indexURL: beside("pyodide/").href }),
    bytes("penstock.zip").then((answer) => answer.arrayBuffer()),
    bytes("planner.py").then((answer) => answer.text()),
  ]);
  python.unpackArchive(program, "zip", { extractDir: "/penstock" });
  python.FS.writeFile("/penstock/planner_page.py", source);
  python.runPython("import sys; sys.path.insert(0, '/penstock'); import planner_page");
  postMessage({ ready: (performance.now() - began) / 1000 });
  return python.pyimport("planner_page");
};

const module = start();
module.catch((error) => postMessage({ failed: String(error) }));
onmessage = async ({ data: { id, call, args } }) => {
  try {
    postMessage({ id, value: JSON.parse((await module)[call](...args)) });
  } catch (error) {
    postMessage({ id, error: String(error).slice(-600) });
  }
};
