// -- the page ---------------------------------------------------------------------------------------------------------

const lists = new Map([...document.querySelectorAll("pre.tasks")].map((list) => [list.id, new TaskList(list)]));
const views = new Map();
const charts = [];
for (const root of document.querySelectorAll(".chart")) {
  const group = root.querySelector(".ticks")?.dataset.group ?? root;
  if (!views.has(group)) views.set(group, new View());
  const view = views.get(group);
  const list = lists.get(root.dataset.list);
  if (list) charts.push(new Lanes(root, view, list));
  else charts.push(root.classList.contains("levels") ? new Levels(root, view) : new Chart(root, view));
}
for (const chart of charts) chart.draw();
if (charts.length) {
  document.querySelector("main > section:has(.chart)").before(element("p", { id: "hint", class: "quiet hint" }, HINT));
}
for (const [id, tasks] of lists) {
  const chart = charts.find((one) => one.list === tasks);
  tasks.list.closest("details").addEventListener(
    "toggle",
    () => tasks.list.replaceWith(element("div", { class: "tasks", id }, tasks.asTable((task) => chart.show(task)))),
    { once: true },
  );
}
addEventListener("resize", () => charts.forEach((chart) => chart.draw()));
addEventListener("beforeprint", () => views.forEach((view) => view.show(0, 1)));
