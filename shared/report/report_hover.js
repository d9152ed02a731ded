"use strict";
// Pointing at a task, or walking to it with the arrow keys, shows what it waits for and what waits for it.
for (const chart of document.querySelectorAll("svg.lanes")) {
  const figure = chart.closest("figure");
  const told = figure.querySelector(".told");
  const links = chart.querySelector(".links");
  const bars = [...chart.querySelectorAll(".bar")];
  const numbers = (bar, name) => (bar.dataset[name] || "").split(" ").filter(Boolean).map(Number);
  const before = bars.map((bar) => numbers(bar, "after"));
  const earlier = bars.map((bar) => numbers(bar, "earlier"));
  const after = bars.map(() => []);
  const later = bars.map(() => []);
  before.forEach((list, bar) => list.forEach((other) => after[other].push(bar)));
  earlier.forEach((list, bar) => list.forEach((other) => later[other].push(bar)));
  const hint = told.textContent;
  let pinned = null;
  let shown = null;

  const words = (bar) => bars[bar].querySelector("title").textContent.split("\n")[0];
  const names = (list) => {
    const most = 6;
    const some = list.slice(0, most).map(words).join(", ");
    return list.length > most ? some + " and " + (list.length - most) + " more" : some;
  };
  const link = (from, to, kind) => {
    const a = bars[from].getBBox();
    const b = bars[to].getBBox();
    const x1 = a.x + a.width, y1 = a.y + a.height / 2, x2 = b.x, y2 = b.y + b.height / 2;
    const path = document.createElementNS(links.namespaceURI, "path");
    const bend = Math.max(12, Math.abs(x2 - x1) / 3);
    path.setAttribute("d", `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`);
    path.setAttribute("class", kind);
    links.append(path);
  };
  const show = (bar) => {
    shown = bar;
    links.replaceChildren();
    chart.classList.toggle("pointing", bar !== null);
    bars.forEach((element, number) => {
      element.classList.toggle("chosen", number === bar);
      element.classList.toggle("waited-for", bar !== null && (before[bar].includes(number) || earlier[bar].includes(number)));
      element.classList.toggle("waiting", bar !== null && (after[bar].includes(number) || later[bar].includes(number)));
    });
    if (bar === null) {
      told.textContent = hint;
      return;
    }
    before[bar].forEach((other) => link(other, bar, "link-before"));
    after[bar].forEach((other) => link(bar, other, "link-after"));
    const [, span, ...rest] = bars[bar].querySelector("title").textContent.split("\n");
    const parts = [words(bar) + ", " + span];
    const held = rest.find((line) => line.startsWith("held up"));
    if (held) parts.push(held);
    if (before[bar].length) parts.push("waits for " + names(before[bar]));
    if (earlier[bar].length) parts.push("from the previous iteration for " + names(earlier[bar]));
    if (after[bar].length) parts.push("waiting for it: " + names(after[bar]));
    if (later[bar].length) parts.push("in the next iteration: " + names(later[bar]));
    told.textContent = parts.join("; ") + ".";
  };
  const barOf = (event) => {
    const place = bars.indexOf(event.target.closest(".bar"));
    return place < 0 ? null : place;
  };
  chart.addEventListener("pointerover", (event) => { if (pinned === null) show(barOf(event)); });
  chart.addEventListener("pointerleave", () => { if (pinned === null) show(null); });
  chart.addEventListener("click", (event) => {
    const bar = barOf(event);
    pinned = bar === pinned ? null : bar;
    show(bar);
  });
  chart.setAttribute("tabindex", "0");
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") {
      pinned = null;
      show(null);
    } else if (step && bars.length) {
      event.preventDefault();
      pinned = shown === null ? 0 : (shown + step + bars.length) % bars.length;
      show(pinned);
    }
  });
}
