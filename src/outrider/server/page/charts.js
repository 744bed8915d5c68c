// The charts, as SVG of the page's own.

import { clock, drawn, element, percent, rate, whole } from "/dashboard/elements.js";

const LEFT = 44;
const RIGHT = 6;
const SPEED = 200;
const SMALL = 54;
const GAP = 32;
const BAND = 12;

/** A round number at or above the value, and the distance of its marks. */
function scale(value, marks = 4) {
  if (value <= 0) return { most: 1, step: 1 };
  const rough = value / marks;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate * marks >= value);
  return { most: step * Math.ceil(value / step), step };
}

/** Runs of neighbours for which `of` gives a value that is not null. */
function runs(samples, of) {
  const out = [];
  let open = null;
  for (const sample of samples) {
    const value = of(sample);
    if (value === null) {
      open = null;
      continue;
    }
    if (!open) out.push((open = []));
    open.push([sample.time, value]);
  }
  return out;
}

export const speedOf = (sample) => (sample.decoded > 1 && sample.seconds > 0 ? sample.decoded / sample.seconds : null);
export const plainOf = (sample) => (sample.compared_tokens > 1 && sample.plain > 0 ? sample.compared_tokens / sample.plain : null);

/** Speed, modes, requests and cache on one time axis. `chosen`: the sample under the pointer, or null. */
export function timeline(node, samples, { from, to, transitions, chosen }) {
  const width = Math.max(280, node.clientWidth);
  const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - RIGHT);
  const shown = samples.filter((sample) => sample.time >= from);
  const bandTop = SPEED + 10;
  const queueTop = bandTop + BAND + GAP;
  const cacheTop = queueTop + SMALL + GAP;
  const height = cacheTop + SMALL + 22;
  const root = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });

  const speeds = shown.flatMap((sample) => [speedOf(sample), plainOf(sample)]).filter((value) => value !== null);
  title(root, 12, "Tokens per second while decoding");
  plot(root, { width, top: 24, height: SPEED - 24, ...scale(Math.max(...speeds, 1)), label: rate }, (y, base) => {
    for (const run of runs(shown, speedOf)) {
      const points = run.map(([time, value]) => [x(time), y(value)]);
      if (points.length === 1) points.push([points[0][0] + 2, points[0][1]]);
      root.append(
        drawn("path", { class: "area", d: `${line(points)}L${points.at(-1)[0]} ${base}L${points[0][0]} ${base}Z` }),
        drawn("path", { class: "speed", d: line(points) }),
      );
    }
    for (const run of runs(shown, plainOf)) root.append(drawn("path", { class: "plain", d: line(run.map(([time, value]) => [x(time), y(value)])) }));
  });

  for (const { start, end, mode } of modes(shown)) {
    const left = x(Math.max(from, start));
    root.append(drawn("rect", { class: `mode mode-${mode}`, x: left, y: bandTop, width: Math.max(1.5, x(end) - left), height: BAND, rx: 2 }));
  }
  for (const { time, after } of transitions.filter((transition) => transition.time >= from)) {
    root.append(
      drawn("line", { class: "change", x1: x(time), x2: x(time), y1: 24, y2: bandTop + BAND }),
      drawn("circle", { class: `change mode-${after}`, cx: x(time), cy: bandTop + BAND / 2, r: 6 }),
    );
  }

  title(root, queueTop - 8, "Texts: running, and waiting above");
  const texts = scale(Math.max(...shown.map((sample) => sample.running + sample.waiting), 2), 2);
  plot(root, { width, top: queueTop, height: SMALL, ...texts, label: whole }, (y, base) => {
    steps(root, shown, x, y, base, (sample) => sample.running + sample.waiting, "waiting");
    steps(root, shown, x, y, base, (sample) => sample.running, "running");
  });
  title(root, cacheTop - 8, "Cache pages in use");
  plot(root, { width, top: cacheTop, height: SMALL, most: 1, step: 0.5, label: percent }, (y, base) => {
    steps(root, shown, x, y, base, (sample) => sample.cache, "cache");
  });

  const marks = Math.max(2, Math.min(6, Math.floor(width / 120)));
  for (let index = 0; index <= marks; index += 1) {
    const time = from + ((to - from) * index) / marks;
    const anchor = index === 0 ? "start" : index === marks ? "end" : "middle";
    root.append(drawn("text", { class: "tick", x: x(time), y: height - 4, "text-anchor": anchor }, clock(time)));
  }
  if (chosen) root.append(drawn("line", { class: "chosen", x1: x(chosen.time), x2: x(chosen.time), y1: 24, y2: cacheTop + SMALL }));
  node.replaceChildren(root);
  return (pixel) => from + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (to - from);
}

const line = (points) => points.map(([px, py], index) => `${index ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
const title = (root, y, text) => root.append(drawn("text", { class: "title", x: LEFT, y }, text));

/** Marks and their lines; then what `draw` adds with y(value) and the base line. */
function plot(root, { width, top, height, most, step, label }, draw) {
  const base = top + height;
  const y = (value) => base - (value / most) * height;
  for (let mark = 0; mark <= most + step / 1000; mark += step) {
    root.append(
      drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }),
      drawn("text", { class: "tick", x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, label(mark)),
    );
  }
  draw(y, base);
}

/** A filled staircase; none where nothing is there. */
function steps(root, samples, x, y, base, of, name) {
  if (!samples.some((sample) => of(sample) > 0)) return;
  let path = `M${x(samples[0].time)} ${base}`;
  for (const sample of samples) path += `V${y(of(sample)).toFixed(1)}H${x(sample.time).toFixed(1)}`;
  root.append(drawn("path", { class: `fill ${name}`, d: `${path}V${base}Z` }));
}

/** Neighbouring seconds of one mode; none where nothing was decoded. */
function modes(samples) {
  const out = [];
  for (const { time, mode } of samples) {
    const last = out.at(-1);
    if (mode === null) continue;
    if (last && last.mode === mode && time - last.end < 1.6) last.end = time;
    else out.push({ start: time - 1, end: time, mode });
  }
  return out;
}

/** Bars for the share of drafts that were right up to each position, those that ended before it included (vLLM's). */
export function positions(node, { drafts, reached, right }) {
  const shown = Math.min(reached.length, 12);
  const list = element("ol", { class: "positions" });
  for (let index = 0; index < shown; index += 1) {
    const share = right[index] / drafts;
    const height = 92;
    const bar = drawn("svg", { width: "100%", height, viewBox: `0 0 10 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      drawn("rect", { class: "rest", width: 10, height }),
      drawn("rect", { class: "share", width: 10, height: Math.max(1, share * height), y: height - Math.max(1, share * height) }));
    list.append(element("li", { title: `${whole(right[index])} of ${whole(drafts)} drafts; ${whole(reached[index])} were so deep` },
      element("span", { class: "value" }, percent(share)), bar, element("span", { class: "place" }, String(index + 1))));
  }
  node.append(list);
}

/** One bar in parts: `[{ share, name }]`. */
export function parts(shares, label) {
  let at = 0;
  const bar = drawn("svg", { class: "parts", width: "100%", height: 10, viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label });
  for (const { share, name } of shares) {
    bar.append(drawn("rect", { class: `part ${name}`, x: 100 * at, width: 100 * share, height: 10 }));
    at += share;
  }
  return bar;
}
