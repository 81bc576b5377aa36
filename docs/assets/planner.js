// The sliders of planner.html. PENSTOCK_TABLE is written beside this file by tools/site.py:
// {models: {name: {words, unit, tokens}}, machines: [...], gpus: [...], batches: [...], answers: {"model|machine|gpus|batch": answer}}
// An answer is [seconds per step, MFU, bytes on the fullest device, Plan], or null where no layout fits.
(function () {
  "use strict";
  const root = document.getElementById("penstock-planner");
  const table = window.PENSTOCK_TABLE;
  if (!root || !table) return;

  const state = { model: 0, machine: 0, gpus: Math.floor(table.gpus.length / 2), batch: 1 };
  const models = Object.keys(table.models);
  const outputs = {};

  function slider(key, label, count, shown) {
    const row = document.createElement("label");
    row.style.cssText = "display:grid;grid-template-columns:8rem 1fr 11rem;gap:.8rem;align-items:center;margin:.5rem 0";
    const input = document.createElement("input");
    Object.assign(input, { type: "range", min: 0, max: count - 1, step: 1, value: state[key] });
    input.setAttribute("aria-label", label);
    const words = document.createElement("output");
    outputs[key] = () => { words.textContent = shown(state[key]); input.setAttribute("aria-valuetext", words.textContent); };
    input.addEventListener("input", () => { state[key] = Number(input.value); show(); });
    row.append(label, input, words);
    root.append(row);
  }

  slider("model", "Model", models.length, (i) => models[i]);
  slider("machine", "Chip", table.machines.length, (i) => table.machines[i]);
  slider("gpus", "GPUs", table.gpus.length, (i) => table.gpus[i].toLocaleString("en"));
  slider("batch", "Global batch", table.batches.length, (i) => table.batches[i].toLocaleString("en") + " samples");
  const answer = document.createElement("div");
  answer.setAttribute("aria-live", "polite");
  root.append(answer);

  function duration(seconds) {
    const units = [["days", 86400], ["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3]];
    const [unit, size] = units.find(([, least]) => seconds >= least) || ["ms", 1e-3];
    return (seconds / size).toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "") + " " + unit;
  }

  function show() {
    Object.values(outputs).forEach((write) => write());
    const name = models[state.model], model = table.models[name], machine = table.machines[state.machine];
    const gpus = table.gpus[state.gpus], batch = table.batches[state.batch];
    const found = table.answers[[name, machine, gpus, batch].join("|")];
    answer.replaceChildren();
    if (!found) {
      answer.append(Object.assign(document.createElement("p"), {
        textContent: `${model.words} fits in no layout on ${gpus.toLocaleString("en")} ${machine}.`,
      }));
      return;
    }
    const [seconds, mfu, bytes, plan] = found;
    const rate = batch / seconds, steps = model.run / batch;
    const rows = [
      ["one step", duration(seconds)],
      [model.tokens ? "tokens per second" : "images per second",
        Math.round(rate * (model.tokens || 1)).toLocaleString("en")],
      [model.run_words, duration(steps * seconds) + `, ${Math.round(steps * seconds * gpus / 3600).toLocaleString("en")} GPU hours`],
      ["share of the chips' peak (MFU)", (100 * mfu).toFixed(1) + " %"],
      ["on the fullest GPU", (bytes / 2 ** 30).toFixed(0) + " GiB"],
    ];
    const list = document.createElement("table");
    for (const [what, value] of rows) {
      const row = list.insertRow();
      row.insertCell().textContent = what;
      row.insertCell().textContent = value;
    }
    const code = document.createElement("pre");
    code.style.whiteSpace = "pre-wrap";
    code.append(Object.assign(document.createElement("code"), { textContent: plan }));
    answer.append(list, Object.assign(document.createElement("p"), { textContent: "The fastest layout:" }), code);
  }
  show();
})();
