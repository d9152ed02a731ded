"use strict";
// A closer look at every chart, by wheel, keys, fingers and buttons, and words about what is pointed at.
//
// A chart has windows, each with a plot inside that is drawn in shares of its width: a closer look widens the plot and
// moves it.  Only ticks and the bars of lanes are drawn anew: ticks at round numbers, and tasks one by one where the
// page had joined them.

const CLOSEST = 1000;
const HINT =
  "Point at anything in a chart for its figures, or walk through it with the arrow keys; a click holds a task. " +
  "Look closer with + and −, with Ctrl and the wheel, or with two fingers; 0 shows the whole again.";

const limited = (value, low, high) => Math.min(high, Math.max(low, value));
const percent = (share) => `${share * 100}%`;

function element(name, attributes = {}, ...content) {
  const isDrawn = ["line", "path", "rect", "text", "title"].includes(name);
  const kin = isDrawn ? document.querySelector("svg") : document.documentElement;
  const made = document.createElementNS(kin.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

function secondsInWords(value) {
  const [worth, name] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([one]) => Math.abs(value) >= one) || [1, "s"];
  return `${+(value / worth).toPrecision(4)} ${name}`;
}

// -- a view: which part of an axis is shown ---------------------------------------------------------------------------

class View {
  constructor() {
    this.charts = [];
    this.at = 0;
    this.zoom = 1;
  }

  /** Show the part that begins at the share `at` of the whole, `zoom` times as large, in all charts of the view. */
  show(at, zoom) {
    this.zoom = limited(zoom, 1, CLOSEST);
    this.at = limited(at, 0, 1 - 1 / this.zoom);
    for (const chart of this.charts) chart.draw();
  }

  /** `around` is the share of the window that stays where it is. */
  closer(factor, around) {
    const zoom = limited(this.zoom * factor, 1, CLOSEST);
    this.show(this.at + around / this.zoom - around / zoom, zoom);
  }

  move(windows) {
    this.show(this.at + windows / this.zoom, this.zoom);
  }

  /** Bring a share of the whole into the window. */
  reach(place) {
    const end = this.at + 1 / this.zoom;
    if (place < this.at || place > end) this.show(place - 0.5 / this.zoom, this.zoom);
  }

  inWindow(place) {
    return (place - this.at) * this.zoom;
  }
}

// -- ticks ------------------------------------------------------------------------------------------------------------

class Ticks {
  constructor(group) {
    this.group = group;
    this.asDrawn = [...group.children];
    const { low, high, most, unit } = group.dataset;
    Object.assign(this, { low: Number(low), high: Number(high), most: Number(most), unit, hasNumbers: low !== undefined });
  }

  draw(view) {
    if (view.zoom === 1) {
      this.group.replaceChildren(...this.asDrawn);
      return;
    }
    const width = this.group.ownerSVGElement.getBoundingClientRect().width;
    const marks = this.hasNumbers ? this.roundNumbers(view, Math.min(this.most, width / 55)) : this.given();
    const [line, text] = ["line", "text"].map((name) => this.asDrawn.findLast((one) => one.localName === name));
    const drawn = [];
    for (const [place, words] of marks) {
      const x = view.inWindow(place);
      if (x < -1e-9 || x > 1 + 1e-9) continue;
      const [tick, label] = [line.cloneNode(), text.cloneNode()];
      for (const key of ["x1", "x2"]) tick.setAttribute(key, percent(x));
      label.setAttribute("x", percent(x));
      label.append(words);
      drawn.push(tick, label);
    }
    this.group.replaceChildren(...drawn);
  }

  given() {
    const texts = this.asDrawn.filter((one) => one.localName === "text");
    return texts.map((one) => [parseFloat(one.getAttribute("x")) / 100, one.textContent]);
  }

  /** Multiples of 1, 2 or 5 times a power of ten, as many as fit; the last one names the unit. */
  roundNumbers(view, most) {
    const span = this.high - this.low;
    const [from, to] = [this.low + view.at * span, this.low + (view.at + 1 / view.zoom) * span];
    const least = (to - from) / Math.max(1, most - 1);
    const power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= least * (1 - 1e-9));
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const marks = [];
    for (let number = Math.ceil(from / step - 1e-9); number * step <= to * (1 + 1e-12); number += 1) {
      marks.push([(number * step - this.low) / span, (number * step).toFixed(decimals).replace("-", "−")]);
    }
    if (marks.length && this.unit) marks[marks.length - 1][1] += ` ${this.unit}`;
    return marks;
  }
}

// -- charts -----------------------------------------------------------------------------------------------------------

/** Any chart: what has a title can be pointed at and walked to. */
class Chart {
  constructor(root, view) {
    Object.assign(this, { root, view, figure: root.closest("figure"), chosen: null, isHeld: false, pointers: new Map() });
    // What is as wide as the axis; a window within a drawing has the extent of what is in it.
    this.window = root.querySelector(".row") ?? root;
    this.ticks = [...root.querySelectorAll(".ticks")].map((group) => new Ticks(group));
    this.told = element("p", { class: "told quiet", "aria-live": "polite" });
    const list = this.figure.querySelector("details");
    if (list) list.before(this.told);
    else this.figure.append(this.told);
    root.setAttribute("tabindex", "0");
    root.setAttribute("aria-describedby", "hint");
    root.setAttribute("aria-keyshortcuts", "+ - 0 ArrowLeft ArrowRight ArrowUp ArrowDown Home End Escape");
    this.addTools();
    this.listen();
    view.charts.push(this);
  }

  addTools() {
    const name = this.figure.querySelector("figcaption b")?.textContent || this.root.getAttribute("aria-label");
    const button = (sign, words, act) => {
      const made = element("button", { type: "button", title: words, "aria-label": `${words}: ${name}` }, sign);
      made.addEventListener("click", act);
      return made;
    };
    this.buttons = [
      button("−", "Less close", () => this.view.closer(1 / 2, this.middle)),
      button("+", "Closer", () => this.view.closer(2, this.middle)),
      button("1:1", "The whole", () => this.view.show(0, 1)),
    ];
    this.figure.prepend(element("div", { class: "tools" }, ...this.buttons));
  }

  draw() {
    const { at, zoom } = this.view;
    for (const plot of this.root.querySelectorAll(".plot")) {
      plot.setAttribute("x", percent(-at * zoom));
      plot.setAttribute("width", percent(zoom));
    }
    this.root.classList.toggle("zoomed", zoom > 1);
    for (const ticks of this.ticks) ticks.draw(this.view);
    for (const place of [0, 2]) this.buttons[place].disabled = zoom === 1;
    this.buttons[1].disabled = zoom === CLOSEST;
  }

  /** The share of the window at which an event is. */
  placeOf(event) {
    const box = this.window.getBoundingClientRect();
    return (event.clientX - box.left) / box.width;
  }

  /** Where the window stays as it is when keys and buttons look closer: in rows of bars where the bars begin. */
  get middle() {
    if (!this.root.classList.contains("rows")) return 0.5;
    const { low, high, hasNumbers } = this.ticks[0];
    return limited(this.view.inWindow(hasNumbers ? -low / (high - low) : 0), 0, 1);
  }

  listen() {
    const { root, view, pointers } = this;
    root.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    root.addEventListener("keydown", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey && this.key(event)) event.preventDefault();
    });
    root.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, event.clientX);
      this.hasDragged = false;
    });
    root.addEventListener("pointermove", (event) => {
      if (!pointers.has(event.pointerId)) this.point(event);
      else this.drag(event);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      root.addEventListener(name, (event) => pointers.delete(event.pointerId));
    }
    root.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && !this.isHeld) this.choose(null);
    });
    root.addEventListener("click", (event) => {
      if (!this.hasDragged) this.point(event, true);
    });
  }

  /** Zooms with Ctrl, as a trackpad's pinch says it too, or once the chart has the focus; else the page scrolls. */
  wheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.root) return;
    if (event.deltaY > 0 && this.view.zoom === 1 && !event.ctrlKey) return;
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.view.move(((event.deltaX || event.deltaY) * pixels) / 500);
    } else {
      this.view.closer(Math.exp(-event.deltaY * pixels * (event.ctrlKey ? 0.01 : 0.003)), this.placeOf(event));
    }
  }

  /** One pointer moves what is shown, two bring it closer. */
  drag(event) {
    const { pointers, view } = this;
    const width = this.window.getBoundingClientRect().width;
    const before = pointers.get(event.pointerId);
    const other = [...pointers].find(([id]) => id !== event.pointerId);
    if (other) {
      const apart = [Math.abs(before - other[1]), Math.abs(event.clientX - other[1])].map((one) => Math.max(one, 8));
      const middle = (event.clientX + other[1]) / 2;
      view.closer(apart[1] / apart[0], this.placeOf({ clientX: middle }));
      view.move((before - event.clientX) / 2 / width);
    } else if (view.zoom > 1) {
      if (!this.hasDragged && Math.abs(event.clientX - before) < 4) return;
      this.root.setPointerCapture(event.pointerId);
      view.move((before - event.clientX) / width);
    } else {
      this.point(event);
      return;
    }
    this.hasDragged = true;
    pointers.set(event.pointerId, event.clientX);
  }

  /** Whether the key means something here. */
  key(event) {
    const { view } = this;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && event.shiftKey) view.move(step / 4);
    else if (step) this.walk(step, event.key === "ArrowUp" || event.key === "ArrowDown");
    else if (event.key === "+" || event.key === "=") view.closer(2, this.middle);
    else if (event.key === "-" || event.key === "_") view.closer(1 / 2, this.middle);
    else if (event.key === "0") view.show(0, 1);
    else if (event.key === "Home" || event.key === "End") this.leap(event.key === "End");
    else if (event.key === "Escape") {
      this.isHeld = false;
      this.choose(null);
    } else return false;
    return true;
  }

  get items() {
    return [...this.root.querySelectorAll("title")].map((title) => title.parentNode);
  }

  point(event) {
    const titled = event.target.closest(":has(> title)");
    this.choose(titled && this.root.contains(titled) ? titled : null);
  }

  walk(step) {
    const items = this.items;
    const place = items.indexOf(this.chosen);
    this.choose(items[place < 0 ? 0 : (place + step + items.length) % items.length] || null);
  }

  leap(toEnd) {
    this.choose(this.items.at(toEnd ? -1 : 0) || null);
  }

  choose(item) {
    this.chosen?.classList.remove("chosen");
    item?.classList.add("chosen");
    this.chosen = item;
    this.say(item ? item.querySelector("title").textContent.replaceAll("\n", "; ") : "");
  }

  say(words) {
    if (this.told.textContent !== words) this.told.textContent = words;
  }
}
