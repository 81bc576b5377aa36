// What a page can do besides being read: switch its colours, copy code, sort tables, show and hide curves, and tell what a
// pointer rests on. Everything on the page is there without it.
(() => {
  const root = document.documentElement;
  const every = (words, inside = document) => [...inside.querySelectorAll(words)];
  const pressed = (element, act) => {
    element.tabIndex = 0;
    element.addEventListener("click", act);
    element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(event); }
    });
  };
  const button = (words, title, act) => {
    const made = document.createElement("button");
    made.textContent = words;
    made.title = title;
    made.type = "button";
    made.addEventListener("click", () => act(made));
    return made;
  };

  // Light, dark, or as the system says.
  const kept = (value) => {
    try { if (value !== undefined) localStorage.penstock = value; return localStorage.penstock; } catch { return value; }
  };
  const themes = ["auto", "light", "dark"];
  const show = (theme, made) => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    made.textContent = theme;
  };
  const theme = button("auto", "colours: as the system says, light, or dark", (made) => {
    const next = themes[(themes.indexOf(made.textContent) + 1) % themes.length];
    show(next, made);
    kept(next);
  });
  theme.className = "theme";
  document.body.prepend(theme);
  show(themes.includes(kept()) ? kept() : "auto", theme);

  // Code, to be pasted somewhere.
  const copy = async (code) => {
    try { await navigator.clipboard.writeText(code); } catch {
      const area = document.createElement("textarea");
      area.value = code;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  for (const pre of every("pre")) {
    const code = pre.textContent;
    pre.append(button("copy", "copy this", async (made) => {
      await copy(code);
      made.textContent = "copied";
      setTimeout(() => { made.textContent = "copy"; }, 1500);
    }));
  }

  // Tables: by the first number of a column's cells, else by its words; empty cells stay last.
  const value = (row, column) => row.cells[column].firstChild?.textContent.trim() ?? "";
  const size = (words) => parseFloat(words.replace(/,/g, "").replace("−", "-"));
  for (const table of every("table")) {
    every("th", table).forEach((head, column) => pressed(head, () => {
      const up = head.ariaSort === "descending" || (head.ariaSort !== "ascending" && head.className.includes("words"));
      every("th", table).forEach((other) => { other.ariaSort = null; });
      head.ariaSort = up ? "ascending" : "descending";
      const order = (a, b) => {
        const [one, two] = [value(a, column), value(b, column)];
        if (!one || !two) return !one - !two;
        const by = isNaN(size(one)) || isNaN(size(two)) ? one.localeCompare(two) : size(one) - size(two);
        return up ? by : -by;
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    }));
  }

  // Legends show and hide what they name.
  for (const key of every(".key")) {
    const named = every("[data-series]", key.closest("svg")).filter((one) => one.dataset.series === key.dataset.key);
    if (!named.length) continue;
    key.classList.add("switch");
    pressed(key, () => {
      const off = key.classList.toggle("off");
      for (const one of named) one.style.display = off ? "none" : "";
    });
  }

  // Tips: of the shape under the pointer, or of the nearest point of a curve.
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  document.body.append(tip);
  for (const title of every("svg.figure title")) {
    if (title.parentNode.tagName !== "svg") { title.parentNode.dataset.tip = title.textContent; title.remove(); }
  }
  const nearest = (svg, event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let found = { far: 18 };
    for (const curve of every("[data-tips]", svg)) {
      if (curve.parentNode.style.display === "none") continue;
      const tips = curve.dataset.tips.split("|");
      [...curve.points].forEach((point, index) => {
        const far = Math.hypot(point.x - at.x, point.y - at.y);
        if (far < found.far) found = { far, curve, words: tips[index] };
      });
    }
    return found;
  };
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest?.("svg.figure");
    const { curve, words } = svg ? nearest(svg, event) : {};
    every(".lit").forEach((one) => one.classList.remove("lit"));
    curve?.classList.add("lit");
    tip.textContent = words ?? event.target.dataset?.tip ?? "";
    tip.hidden = !tip.textContent;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  });
})();
