// -- levels over time -------------------------------------------------------------------------------------------------

/** Curves of memory: the levels at the time that is pointed at. */
class Levels extends Chart {
  constructor(root, view) {
    super(root, view);
    this.width = root.querySelector(".stretched").viewBox.baseVal.width;
    this.curves = [...root.querySelectorAll("[data-name]")].map((path) => this.stepsOf(path));
    const { high, top, bottom, unit } = root.querySelector(".heights").dataset;
    this.levelAt = (y) => ((bottom - y) / (bottom - top)) * high;
    this.unit = unit;
    this.isStack = root.querySelector("clipPath") !== null;
    this.cursor = element("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    root.append(this.cursor);
  }

  /** The steps of a path, as far as it leads to the right. */
  stepsOf(path) {
    const steps = [];
    let [x, y] = [-1, 0];
    for (const [, command, first, second] of path.getAttribute("d").matchAll(/([MHV])([-\d.]+)(?: ([-\d.]+))?/g)) {
      if (command === "V") y = Number(first);
      else if (Number(first) < x) break;
      else x = Number(first);
      if (command === "M") y = Number(second);
      steps.push([x, y]);
    }
    return { name: path.dataset.name, steps };
  }

  heightAt(curve, x) {
    let [low, high] = [0, curve.steps.length - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (curve.steps[middle][0] <= x) low = middle;
      else high = middle - 1;
    }
    return this.levelAt(curve.steps[low][1]);
  }

  point(event) {
    const place = limited(this.placeOf(event), 0, 1);
    this.choose(this.view.at + place / this.view.zoom);
  }

  walk(step) {
    const place = this.chosen === null ? this.view.at : this.chosen + step / 200 / this.view.zoom;
    this.view.reach(limited(place, 0, 1));
    this.choose(limited(place, 0, 1));
  }

  leap(toEnd) {
    this.view.reach(toEnd ? 1 : 0);
    this.choose(toEnd ? 1 : 0);
  }

  /** `place` is a share of the whole axis. */
  choose(place) {
    this.chosen = place;
    this.cursor.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place === null) {
      this.say("");
      return;
    }
    for (const key of ["x1", "x2"]) this.cursor.setAttribute(key, percent(this.view.inWindow(place)));
    const { low, high, unit } = this.ticks[0];
    const heights = this.curves.map((curve) => this.heightAt(curve, place * this.width));
    const told = this.curves.map(({ name }, number) => {
      const level = this.isStack && number ? heights[number] - heights[number - 1] : heights[number];
      return `${name} ${this.sizeInWords(level)}`;
    });
    if (this.isStack) told.push(`together ${this.sizeInWords(heights.at(-1))}`);
    this.say(`at ${+(low + place * (high - low)).toPrecision(5)} ${unit}: ${told.join(", ")}`);
  }

  sizeInWords(level) {
    return `${+Math.max(0, level).toPrecision(3)} ${this.unit}`;
  }

  draw() {
    super.draw();
    if (this.cursor && this.chosen !== null) this.choose(this.chosen);
  }
}
