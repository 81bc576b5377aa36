// The form of docs/planner.md. planner.py answers, in a worker (planner-worker.js); the address keeps the question, so that
// it can be shared.
(() => {
  const root = document.getElementById("penstock-planner");
  if (!root) return;
  const here = document.currentScript.src;
  const make = (tag, given = {}, ...inside) => {
    const made = Object.assign(document.createElement(tag), given);
    made.append(...inside);
    return made;
  };
  const state = make("p", { className: "state", textContent: "Python is loading, some ten megabytes from beside this page …" });
  state.setAttribute("role", "status");
  root.append(state);
  if (location.protocol === "file:") {
    state.textContent = "A browser starts Python only on served pages: python -m http.server -d build/site";
    return;
  }

  // -- calls of planner.py

  const worker = new Worker(new URL("planner-worker.js", here), { type: "module" });
  const waiting = new Map();
  let count = 0;
  const ask = (call, ...args) => new Promise((resolve, reject) => {
    waiting.set(++count, { resolve, reject });
    worker.postMessage({ id: count, call, args });
  });
  const failed = (words) => {
    state.textContent = `The planner cannot run here: ${words}. penstock plan answers the same in a terminal.`;
  };
  worker.onerror = () => failed("this copy of the site was built without Python for browsers (it needs npm), or the browser is too old");
  worker.onmessage = ({ data }) => {
    if (data.failed) failed(data.failed);
    if (data.ready) { root.dataset.ready = data.ready.toFixed(2); state.textContent = ""; }
    const { resolve, reject } = waiting.get(data.id) ?? {};
    waiting.delete(data.id);
    if (data.error) reject?.(new Error(data.error)); else resolve?.(data.value);
  };

  // -- the form

  const form = make("form");
  const field = (name, label, control) => {
    control.name = name;
    return make("label", {}, make("span", { textContent: label }), control);
  };
  const number = (name, label, placeholder, value = "") =>
    field(name, label, make("input", { inputMode: "decimal", placeholder, value, autocomplete: "off", size: 12 }));
  const group = (title, open, ...inside) =>
    make("details", { open }, make("summary", { textContent: title }), make("div", { className: "fields" }, ...inside));
  const own = make("div", { className: "fields" }), cluster = make("div", { className: "fields" });
  const out = make("div", { className: "answer" }), more = make("div", { className: "answer" });
  out.setAttribute("aria-live", "polite");

  const start = async () => {
    const { models, machines, style } = await ask("choices");
    document.head.append(make("style", { textContent: style }));
    const options = (names) => names.map((name) => make("option", { value: name, textContent: name }));
    const pick = make("select", {}, ...Object.entries(models).map(([family, names]) =>
      make("optgroup", { label: family }, ...options(names))));
    const chip = make("select", {}, ...options(Object.keys(machines)));
    const asked = new URLSearchParams(location.hash.slice(1));
    const pasted = make("textarea", { rows: 4, cols: 50, placeholder: '{"model_type": "qwen2", "hidden_size": 8192, …}', spellcheck: false });
    const named = make("input", { size: 20, placeholder: "Qwen2-72B" });
    form.append(
      make("div", { className: "fields" },
        field("model", "Model", pick), field("machine", "Chip", chip),
        number("gpus", "Devices", "8", "64"), number("global_batch", "Samples a step", "the planner's choice"),
        number("tokens", "Tokens of the run", "15e12"), number("images", "Images of the run", "1.15e8"),
        number("price", "Price of a device hour", "2.50"), number("grams_per_kwh", "Grams of CO₂ per kWh", "380")),
      make("details", {}, make("summary", { textContent: "A config.json of your own" }), make("div", { className: "fields" },
        field("config", "Paste it, or drop the file on this page", pasted), field("name", "Its name", named))),
      make("details", {}, make("summary", { textContent: "Sizes of your own" }), own),
      make("details", {}, make("summary", { textContent: "A cluster of your own" }), cluster),
      group("Fixed settings", false, field("base", "Plan", make("input", { size: 50, placeholder: "precision=O1 tp=2 recompute=full" }))),
      group("Compare", false, field("beside", "Plans, with | between them", make("input", { size: 50, placeholder: "tp=4 | pp=2" }))),
    );
    const mine = make("option", { value: "", hidden: true });  // the pasted model, which question() says as config
    pick.prepend(mine);
    pasted.value = asked.get("config") ?? "";
    pick.value = asked.get("model") || "llama3-8b";
    chip.value = asked.get("machine") ?? "h100";
    if (!pick.value) pick.value = "llama3-8b";
    if (!chip.value) chip.value = "h100";

    const resize = async () => {
      const described = pasted.value.trim();
      if (!described && !pick.value) pick.value = "llama3-8b";
      const { sizes, images, called } = await ask("sizes", pick.value, pasted.value);
      if (described) { mine.textContent = called ?? "your config.json"; pick.value = ""; }
      own.replaceChildren(...Object.entries(sizes).map(([name, value]) => number(`model.${name}`, name.replaceAll("_", " "), String(value))));
      form.elements.tokens.parentNode.hidden = images;
      form.elements.images.parentNode.hidden = !images;
    };
    const units = { memory_bytes: "memory, GiB", link_bytes_per_second: "link inside a node, GB/s",
      node_bytes_per_second: "network of a node, GB/s", devices_per_node: "devices per node" };
    const rebuild = () => cluster.replaceChildren(...Object.entries(machines[chip.value]).map(([name, value]) =>
      number(`machine.${name}`, units[name], value ? String(+value.toPrecision(4)) : "unknown")));
    await resize();
    rebuild();
    for (const [name, value] of asked) if (form.elements[name]) form.elements[name].value = value;
    for (const part of form.querySelectorAll("details")) {
      part.open = [...part.querySelectorAll("input, textarea")].some((input) => input.value);
    }
    pasted.addEventListener("change", async () => { await resize(); show(); });
    root.addEventListener("dragover", (event) => event.preventDefault());
    root.addEventListener("drop", async (event) => {
      const [file] = event.dataTransfer.files;
      if (!file) return;
      event.preventDefault();
      pasted.value = await file.text();
      named.value = file.name === "config.json" ? "" : file.name.replace(/\.json$/, "");
      pasted.closest("details").open = true;
      pasted.dispatchEvent(new Event("change"));
    });
    pick.addEventListener("change", async () => { pasted.value = named.value = ""; await resize(); show(); });
    chip.addEventListener("change", () => { rebuild(); show(); });
    let later;
    form.addEventListener("input", (event) => {
      if (event.target.tagName === "SELECT" || event.target === pasted) return;
      clearTimeout(later);
      later = setTimeout(show, 350);
    });
    form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
    root.append(form, out, more);
    await show();
  };

  const question = () => Object.fromEntries([...form.elements]
    .filter((one) => one.name && one.value.trim() && !one.parentNode.hidden)
    .map((one) => [one.name, one.value.trim()]));

  // -- the answer

  const figure = ({ title, svg, words }) => {
    const made = make("figure", {}, make("figcaption", { textContent: title }));
    made.insertAdjacentHTML("beforeend", svg); // drawn by planner.py, whose words are escaped
    if (words) made.append(make("p", { textContent: words }));
    return made;
  };
  const width = () => Math.max(280, Math.min(760, root.clientWidth));  // text of figures keeps its size
  let latest = 0;
  const show = async () => {
    const mine = ++latest, given = question(), words = JSON.stringify(given);
    history.replaceState(null, "", `#${new URLSearchParams(given)}`);
    state.textContent = "searching …";
    let found;
    try { found = await ask("answer", words, width()); } catch (error) { found = { refused: String(error.message) }; }
    if (mine !== latest) return;
    state.textContent = "";
    more.replaceChildren();
    if (found.refused) {
      out.replaceChildren(make("p", { className: "refused", textContent: found.refused }));
      root.dataset.answered = words;
      return;
    }
    const table = (rows) => {
      const made = make("table");
      for (const cells of rows) {
        const row = made.insertRow();
        for (const cell of cells) row.insertCell().textContent = cell;
      }
      return make("div", { className: "wide" }, made);
    };
    out.replaceChildren(
      make("h3", { textContent: found.title }), table(found.rows),
      make("p", { textContent: `The fastest of ${found.tried.toLocaleString("en")} layouts:` }),
      make("pre", {}, make("code", { textContent: found.plan })),
      ...(found.others.length ? [make("p", { textContent: "Beside it:" }), table(found.beside)] : []),
      ...found.others.map((line) => make("p", { textContent: line })),
      ...found.figures.map(figure),
      make("p", { textContent: "Why the others are slower:" }),
      make("ul", {}, ...found.why.map((line) => make("li", { textContent: line }))),
      make("p", { textContent: "The same in a terminal:" }), make("pre", {}, make("code", { textContent: found.command })),
    );
    root.dataset.answered = words;
    const points = [], whole = Number(given.gpus || 8);
    for (const factor of [1, 2, 0.5, 4, 0.25, 8, 0.125]) {
      const gpus = whole * factor;
      if (!Number.isInteger(gpus)) continue;
      const point = await ask("point", words, gpus).catch(() => null);
      if (mine !== latest) return;
      if (point) points.push(point);
      const drawn = await ask("curves", JSON.stringify(points), Number(given.price || 0), width()).catch(() => []);
      if (mine !== latest) return;
      more.replaceChildren(...drawn.map(figure));
    }
    root.dataset.curves = String(points.length);
  };

  root.append(make("style", { textContent: `
    #penstock-planner label { display: grid; gap: .2rem; font-size: .72rem; }
    #penstock-planner label[hidden] { display: none; }
    #penstock-planner .fields { display: flex; flex-wrap: wrap; gap: .8rem; margin: .6rem 0; }
    #penstock-planner input, #penstock-planner select, #penstock-planner textarea { font: inherit; padding: .3rem .4rem; border: 1px solid var(--md-default-fg-color--lighter);
      border-radius: .2rem; background: var(--md-default-bg-color); color: inherit; max-width: 100%; }
    #penstock-planner summary { cursor: pointer; font-size: .75rem; }
    #penstock-planner .refused { border-left: .2rem solid #b4233c; padding-left: .8rem; white-space: pre-wrap; }
    #penstock-planner .wide { overflow-x: auto; }
    #penstock-planner pre { white-space: pre-wrap; }
    #penstock-planner figure { width: 100%; margin: 1.2rem 0; }
    #penstock-planner figure p { text-align: left; }
    #penstock-planner figcaption { font-style: normal; font-weight: 700; max-width: none; }` }));
  start().catch((error) => failed(error.message));
})();
