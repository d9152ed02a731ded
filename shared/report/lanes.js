// -- tasks on lanes ---------------------------------------------------------------------------------------------------

/** The tasks of a list on the page; see task_list in timeline.py. */
class TaskList {
  constructor(list) {
    this.list = list;
    const { colours, period, worth } = list.dataset;
    const kinds = colours.split(";").map((one) => one.split("=")).sort((a, b) => b[0].length - a[0].length);
    Object.assign(this, { period: Number(period), worth: Number(worth), tasks: new Map(), lanes: [] });
    const [head, ...lines] = list.textContent.split("\n");
    this.head = head.split("\t");
    for (const line of lines) {
      const [number, name, start, duration, after = "", earlier = "", held = ""] = line.split("\t");
      if (name === undefined) {
        this.lanes.push({ name: number, tasks: [] });
        continue;
      }
      const [kind, colour] = kinds.find(([words]) => name.startsWith(words)) || ["", "rest"];
      const numbers = (text) => text.split(" ").filter(Boolean).map(Number);
      const subject = name.slice(kind.length).split(" of micro-batch ")[0].trim().replace(/^chunk /, "");
      const row = this.lanes.length - 1;
      const task = { number: Number(number), name, subject, colour, row, held, cells: line.split("\t") };
      Object.assign(task, { start: Number(start), end: Number(start) + Number(duration) });
      Object.assign(task, { after: numbers(after), earlier: numbers(earlier), next: [], later: [] });
      this.tasks.set(task.number, task);
      this.lanes[row].tasks.push(task);
    }
    for (const task of this.tasks.values()) {
      for (const other of task.after) this.tasks.get(other)?.next.push(task.number);
      for (const other of task.earlier) this.tasks.get(other)?.later.push(task.number);
    }
    this.pieces = this.lanes.map((lane) => lane.tasks.flatMap((task) => this.folded(task)).sort((a, b) => a.start - b.start));
  }

  /** As period.py has it. */
  folded(task) {
    const { period } = this;
    const length = task.end - task.start;
    if (!(length < period)) return [{ task, start: 0, end: period, iteration: 0 }];
    const periods = Math.floor(task.start / period + 1e-6);
    const start = Math.max(0, task.start - periods * period);
    const pieces = [{ task, start, end: Math.min(start + length, period), iteration: -periods }];
    const beyond = start + length - period;
    if (beyond > 1e-6 * period) pieces.push({ task, start: 0, end: beyond, iteration: -periods - 1 });
    return pieces;
  }

  /** The list as a table, whose tasks `show` puts into the chart. */
  asTable(show) {
    const body = element("tbody");
    for (const lane of this.lanes) {
      const span = { colspan: this.head.length, scope: "rowgroup" };
      body.append(element("tr", {}, element("th", span, lane.name)));
      for (const task of lane.tasks) {
        const button = element("button", { type: "button" }, task.name);
        button.addEventListener("click", () => show(task));
        const cells = task.cells.map((cell, place) => element("td", {}, place === 1 ? button : cell));
        body.append(element("tr", {}, ...cells));
      }
    }
    const head = element("thead", {}, element("tr", {}, ...this.head.map((name) => element("th", { scope: "col" }, name))));
    return element("table", {}, head, body);
  }
}

/** Lanes: what tasks wait for, and every task by itself from close enough. */
class Lanes extends Chart {
  constructor(root, view, tasks) {
    super(root, view);
    this.list = tasks;
    this.group = root.querySelector(".bars");
    this.links = root.querySelector(".links");
    this.asDrawn = [...this.group.children];
    const top = root.querySelectorAll(".track");
    this.tops = [...top].map((track) => [Number(track.getAttribute("y")), Number(track.getAttribute("height"))]);
    const { low, high, worth } = root.querySelector(".ticks").dataset;
    // The axis in the list's unit.
    [this.low, this.high] = [low, high].map((value) => (value * worth) / tasks.worth);
    this.readBars();
  }

  draw() {
    super.draw();
    if (!this.group) return;
    this.group.replaceChildren(...(this.view.zoom === 1 ? this.asDrawn : this.barsInView()));
    this.readBars();
    this.choose(this.chosen);
  }

  readBars() {
    this.barOf = new Map();
    for (const bar of this.group.querySelectorAll(".bar")) {
      for (const number of bar.dataset.tasks.split(" ")) {
        if (!this.barOf.has(Number(number))) this.barOf.set(Number(number), bar);
      }
    }
  }

  /** Bars of what is in the window, joined where two pixels hold several, as bars.py does. */
  barsInView() {
    const { view } = this;
    const span = this.high - this.low;
    const [from, to] = [this.low + view.at * span, this.low + (view.at + 1 / view.zoom) * span];
    const pixel = (to - from) / this.window.getBoundingClientRect().width;
    const drawn = [];
    for (const pieces of this.list.pieces) {
      let joint = [];
      for (const piece of pieces) {
        if (piece.end < from || piece.start > to) continue;
        const isNarrow = piece.end - piece.start < 2 * pixel;
        const last = joint.at(-1);
        if (last && (!isNarrow || piece.start - last.end >= 2 * pixel || piece.end - joint[0].start > 6 * pixel)) {
          drawn.push(...this.bar(joint, pixel));
          joint = [];
        }
        if (isNarrow) joint.push(piece);
        else drawn.push(...this.bar([piece], pixel));
      }
      if (joint.length) drawn.push(...this.bar(joint, pixel));
    }
    return drawn;
  }

  bar(pieces, pixel) {
    const span = this.high - this.low;
    const share = (value) => (limited(value, this.low, this.high) - this.low) / span;
    const [{ task, start, iteration }, end] = [pieces[0], Math.max(...pieces.map((piece) => piece.end))];
    const [y, height] = this.tops[task.row];
    const width = (share(end) - share(start)) * (span / pixel);
    const edge = iteration ? "neighbours" : width > 4 ? "task" : "thin";
    const drawn = [
      element("rect", {
        x: percent(share(start)),
        y,
        height,
        width: percent(Math.max(share(end) - share(start), (1.5 * pixel) / span)),
        class: `bar ${edge} fill-${task.colour}`,
        "data-tasks": pieces.map((piece) => piece.task.number).join(" "),
      }),
    ];
    drawn[0].append(element("title", {}, this.titleOf(pieces.map((piece) => piece.task))));
    if (pieces.length === 1 && task.subject.length * 7 + 3 <= width) {
      const place = { x: percent((share(start) + share(end)) / 2), y: y + height / 2 + 4, "text-anchor": "middle" };
      drawn.push(element("text", { ...place, class: `mark on-${task.colour}` }, task.subject));
    }
    return drawn;
  }

  titleOf(tasks) {
    const names = tasks.slice(0, 4).map((task) => task.name);
    const more = tasks.length > names.length ? ` and ${tasks.length - names.length} more` : "";
    const { worth } = this.list;
    const [start, end] = [tasks[0].start, Math.max(...tasks.map((task) => task.end))].map((at) => secondsInWords(at * worth));
    return `${names.join(", ")}${more}\n${start} to ${end}`;
  }

  point(event, isClick = false) {
    const bar = event.target.closest(".bar");
    const numbers = bar ? bar.dataset.tasks.split(" ").map(Number) : null;
    if (isClick) {
      const isSame = numbers !== null && this.isHeld && String(numbers) === String(this.chosen);
      this.isHeld = numbers !== null && !isSame;
      this.choose(this.isHeld ? numbers : null);
    } else if (!this.isHeld) this.choose(numbers);
  }

  /** Along the lane, or to the lane above or below at the same time. */
  walk(step, isAcross) {
    const { pieces } = this.list;
    const lanes = pieces.map((lane) => lane.filter((piece) => piece.start < this.high && piece.end > this.low));
    const busy = lanes.filter((lane) => lane.length);
    if (!busy.length) return;
    const now = this.chosen && lanes.flat().find((piece) => piece.task.number === this.chosen[0]);
    if (!now) this.hold(busy[0].find((piece) => piece.end >= this.low + this.view.at * (this.high - this.low)) || busy[0][0]);
    else if (isAcross) {
      const lane = busy[(busy.indexOf(lanes[now.task.row]) + step + busy.length) % busy.length];
      const apart = (piece) => Math.max(piece.start - now.start, now.start - piece.end, 0);
      this.hold(lane.reduce((best, piece) => (apart(piece) < apart(best) ? piece : best)));
    } else {
      const lane = lanes[now.task.row];
      this.hold(lane[(lane.indexOf(now) + step + lane.length) % lane.length]);
    }
  }

  leap(toEnd) {
    const row = this.chosen ? this.list.tasks.get(this.chosen[0]).row : 0;
    const lane = this.list.pieces[row];
    if (lane.length) this.hold(lane.at(toEnd ? -1 : 0));
  }

  hold(piece) {
    this.view.reach((limited(piece.start, this.low, this.high) - this.low) / (this.high - this.low));
    this.isHeld = true;
    this.choose([piece.task.number]);
  }

  /** So close that the task is a tenth of the window. */
  show(task) {
    const [piece] = this.list.folded(task);
    const span = this.high - this.low;
    const share = Math.max((piece.end - piece.start) / span, 1e-9);
    const zoom = limited(0.1 / share, 1, CLOSEST);
    this.view.show((piece.start - this.low) / span + share / 2 - 0.5 / zoom, zoom);
    this.hold(piece);
    this.root.scrollIntoView({ block: "center" });
    this.root.focus({ preventScroll: true });
  }

  /** Tasks by number: they are stressed with all that they wait for and that waits for them. */
  choose(numbers) {
    this.chosen = numbers;
    const tasks = (numbers || []).map((number) => this.list.tasks.get(number));
    const all = (name) => new Set(tasks.flatMap((task) => task[name]).filter((other) => !numbers.includes(other)));
    const found = { after: all("after"), earlier: all("earlier"), next: all("next"), later: all("later") };
    this.root.classList.toggle("pointing", numbers !== null);
    const bars = (...sets) => new Set(sets.flatMap((set) => [...set]).map((number) => this.barOf.get(number)));
    const [own, before, behind] = [bars(numbers || []), bars(found.after, found.earlier), bars(found.next, found.later)];
    for (const bar of this.group.querySelectorAll(".bar")) {
      bar.classList.toggle("chosen", own.has(bar));
      bar.classList.toggle("waited-for", before.has(bar));
      bar.classList.toggle("waiting", behind.has(bar));
    }
    this.links.replaceChildren();
    if (numbers === null) {
      this.say("");
      return;
    }
    for (const task of tasks) {
      for (const other of task.after) this.link(other, task.number, "link-before");
      for (const other of task.next) this.link(task.number, other, "link-after");
    }
    this.say(this.words(tasks, found));
  }

  words(tasks, { after, earlier, next, later }) {
    const names = (numbers) => {
      const some = [...numbers].slice(0, 6).map((number) => this.list.tasks.get(number)?.name ?? `task ${number}`);
      return some.join(", ") + (numbers.size > some.length ? ` and ${numbers.size - some.length} more` : "");
    };
    const parts = [this.titleOf(tasks).replace("\n", ", ")];
    if (tasks.length === 1 && tasks[0].held) {
      const [number, ...rest] = tasks[0].held.split(", ");
      parts.push([`held up by ${names(new Set([Number(number)]))}`, ...rest].join(", "));
    }
    if (after.size) parts.push(`waits for ${names(after)}`);
    if (earlier.size) parts.push(`from the previous iteration for ${names(earlier)}`);
    if (next.size) parts.push(`waiting for it: ${names(next)}`);
    if (later.size) parts.push(`in the next iteration: ${names(later)}`);
    return `${parts.join("; ")}.`;
  }

  link(from, to, kind) {
    const [a, b] = [from, to].map((number) => this.barOf.get(number)?.getBoundingClientRect());
    if (!a || !b) return;
    const box = this.window.getBoundingClientRect();
    const inside = (x) => limited(x - box.left, 0, box.width);
    const [x1, y1, x2, y2] = [inside(a.right), a.top + a.height / 2 - box.top, inside(b.left), b.top + b.height / 2 - box.top];
    const bend = Math.max(12, Math.abs(x2 - x1) / 3);
    const path = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
    this.links.append(element("path", { d: path, class: kind }));
  }
}
