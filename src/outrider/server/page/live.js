// What the server does now, from its state.

import { ask } from "/dashboard/api.js";
import { parts, plainOf, positions, speedOf, timeline } from "/dashboard/charts.js";
import { byId, clock, duration, element, empty, many, percent, rate, say, table, times, whole } from "/dashboard/elements.js";

const KEPT = 600; // samples
const LATELY = 60; // seconds that the figures at the top look back
const SOURCES = { suffix: "a", ngram: "a", eagle: "b", "suffix+eagle": "c", grammar: "d" };

/** The colour class of who guessed; the server's own words are not class names. */
export const colour = (source) => `source-${SOURCES[source] ?? "a"}`;

export class Live {
  constructor() {
    this.next = 0;
    this.started = null;
    this.samples = [];
    this.transitions = [];
    this.all = false; // the person asked for all of them
    this.range = 120;
    this.pointed = null; // time under the pointer
    this.fixed = {}; // what was drawn last, by place: drawn again only when it changes
    byId("range").addEventListener("change", (event) => {
      this.range = Number(event.target.value);
      this.draw();
    });
    const chart = byId("timeline");
    chart.addEventListener("pointermove", (event) => this.point(this.timeAt?.(event.clientX - chart.getBoundingClientRect().left)));
    chart.addEventListener("pointerleave", () => this.point(null));
    chart.addEventListener("blur", () => this.point(null));
    chart.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (!by || !this.samples.length) return;
      event.preventDefault();
      this.point((this.pointed ?? this.samples.at(-1).time) + by);
    });
    byId("transitions-all").addEventListener("click", () => this.fetchAll());
    new ResizeObserver(() => this.draw()).observe(chart);
    byId("time-keys").append(
      ...[["speed", "tokens/s, measured"], ["plain", "tokens/s of plain decoding, measured meanwhile"],
        ["mode-speculative", "speculative"], ["mode-probing", "probing"], ["mode-plain", "plain"]].map(([name, text]) =>
        element("li", {}, element("i", { class: `key key-${name}`, "aria-hidden": "true" }), text)));
  }

  /** Tokens per second of plain decoding, measured lately; null if unknown. */
  plain() {
    return this.lately?.plain ?? null;
  }

  show(state) {
    if (this.started !== state.server.started || state.samples.next < this.next) [this.samples, this.transitions, this.all] = [[], [], false];
    this.started = state.server.started;
    this.next = state.samples.next;
    this.now = state.time;
    const { columns, rows } = state.samples;
    this.samples.push(...rows.map((row) => Object.fromEntries(columns.map((column, index) => [column, row[index]]))));
    this.samples = this.samples.slice(-KEPT);
    this.transitions = this.all ? merged(this.transitions, state.transitions) : state.transitions;
    this.unlisted = state.transitions_kept > this.transitions.length;
    this.lately = this.summary(state);
    this.figures(state);
    this.draw();
    this.place("acceptance", state.acceptance, (acceptance) => this.acceptance(acceptance));
    this.place("latency", state.latency, latency);
    this.place("waste", state.totals, waste);
    this.listChanges(state.transitions_kept);
    this.place("requests", state.requests, requests);
    this.place("weights", state.models, weights);
    say("latency-under", state.latency.itl.count ? `The latest ${whole(state.latency.itl.count)} steps.` : "");
    say("requests-under", `${whole(state.queue.places)} texts at once; the rest waits.`);
    say("model", `${state.server.name} · ${state.models[0] ? state.models[0].sha256.slice(0, 8) : ""}`);
    say("footer", `Outrider ${state.server.version} · ${state.server.fingerprint} · since ${clock(state.server.started)} · ` +
      `${whole(state.totals.tokens)} tokens written · ${whole(state.queue.preemptions)} preemptions`);
  }

  listChanges(kept) {
    this.place("transitions", this.transitions, changes);
    byId("transitions-under").hidden = this.all || kept <= this.transitions.length;
    say("transitions-count", `The latest ${whole(this.transitions.length)} of ${whole(kept)}.`);
  }

  /** All changes that the server remembers; from now on the list only grows. */
  async fetchAll() {
    const button = byId("transitions-all");
    button.disabled = true;
    try {
      const { transitions } = await (await ask("/dashboard/transitions")).json();
      this.transitions = merged(transitions, this.transitions);
      this.all = true;
      this.listChanges(this.transitions.length);
    } catch (error) {
      say("transitions-count", `${error.message}.`);
    } finally {
      button.disabled = false;
    }
  }

  place(id, data, draw) {
    const text = JSON.stringify(data);
    if (this.fixed[id] === text) return;
    this.fixed[id] = text;
    byId(id).replaceChildren(...[draw(data)].flat());
  }

  /** Over the latest seconds in which texts were decoded. */
  summary(state) {
    const busy = this.samples.filter((sample) => sample.time > state.time - LATELY && speedOf(sample) !== null);
    const sum = (name) => busy.reduce((total, sample) => total + sample[name], 0);
    if (!busy.length) return null;
    const compared = sum("compared_tokens") > 1 && sum("plain") > 0;
    return {
      speed: compared ? sum("compared_tokens") / sum("compared") : sum("decoded") / sum("seconds"),
      speedup: compared ? sum("plain") / sum("compared") : null,
      plain: compared ? sum("compared_tokens") / sum("plain") : null,
      drafted: sum("drafted"),
      accepted: sum("accepted"),
      mode: busy.at(-1).mode,
    };
  }

  figures(state) {
    const lately = this.lately;
    const own = state.drafters.own;
    const mode = state.modes[own] && (state.modes[own] === "plain" && lately?.mode === "probing" ? "probing" : state.modes[own]);
    const others = Object.entries(state.modes).filter(([drafter]) => drafter !== own);
    say("now-speedup", lately?.speedup ? times(lately.speedup) : "–");
    say("now-speedup-under", !lately ? "nothing was decoded in the last minute"
      : lately.speedup ? `plain decoding would give ${rate(lately.plain)} tokens/s` : "no plain step was measured beside a draft");
    say("now-speed", lately ? rate(lately.speed) : "–");
    say("now-speed-under", lately ? "while decoding" : "idle");
    say("now-mode", mode ?? "–");
    byId("now-mode").dataset.mode = mode ?? "";
    say("now-mode-under", [mode ? `drafter ${own}` : `${own} was not asked yet`, ...others.map(([drafter, its]) => `${drafter}: ${its}`)].join(", "));
    say("now-acceptance", lately?.drafted ? percent(lately.accepted / lately.drafted) : "–");
    say("now-acceptance-under", lately?.drafted ? `of ${many(lately.drafted, "guess", "guesses")} in the last minute` : "no guesses in the last minute");
    say("now-requests", `${whole(state.queue.running)}`);
    say("now-requests-under", `running; ${whole(state.queue.waiting)} waiting, cache ${percent(1 - state.cache.free / state.cache.pages)}`);
  }

  point(time) {
    this.pointed = time ?? null;
    this.draw();
  }

  draw() {
    if (this.now === undefined) return;
    const from = this.now - this.range;
    const shown = this.samples.filter((sample) => sample.time >= from);
    const chosen = this.pointed === null || !shown.length ? null
      : shown.reduce((best, sample) => (Math.abs(sample.time - this.pointed) < Math.abs(best.time - this.pointed) ? sample : best));
    this.timeAt = timeline(byId("timeline"), this.samples, { from, to: this.now, transitions: this.transitions, chosen });
    const told = chosen ? secondOf(chosen) : shown.some((sample) => speedOf(sample) !== null) ? overview(shown, this.transitions, from, this.unlisted)
      : "Nothing was decoded in this time. Run something in the playground, or send a request.";
    say("readout", told);
    byId("timeline").setAttribute("aria-label", `Tokens per second over time. ${told}`);
  }

  acceptance(acceptance) {
    const drafters = Object.entries(acceptance);
    if (!drafters.length) return empty("No guess was checked yet.");
    return drafters.map(([name, { drafts, drafted, accepted, reached, right, sources }]) => {
      const block = element("div", { class: "drafter" },
        element("h3", {}, name),
        element("p", { class: "under" }, `${percent(accepted / drafted)} of the guesses, ${(1 + accepted / drafts).toFixed(2)} tokens per step; the latest ${many(drafts, "draft")}`));
      positions(block, { drafts, reached, right });
      const shares = Object.entries(sources).sort(([, one], [, other]) => other - one);
      if (shares.length && accepted) {
        const told = shares.map(([source, count]) => `${source} ${percent(count / accepted)}`).join(", ");
        block.append(
          element("p", { class: "under" }, "Who made the accepted guesses"),
          parts(shares.map(([source, count]) => ({ share: count / accepted, name: colour(source) })), told),
          element("ul", { class: "keys" }, shares.map(([source, count]) =>
            element("li", {}, element("i", { class: `key part ${colour(source)}`, "aria-hidden": "true" }), `${source} ${percent(count / accepted)}`))));
      }
      return block;
    });
  }
}

function secondOf(sample) {
  const speed = speedOf(sample);
  const plain = plainOf(sample);
  const decoded = speed === null ? "nothing decoded" : `${rate(speed)} tokens/s` + (plain === null ? "" : `, plain ${rate(plain)}, ${times(speed / plain)}`) + `, ${sample.mode}`;
  return `${clock(sample.time)}: ${decoded}; ${sample.running} running, ${sample.waiting} waiting, cache ${percent(sample.cache)}`;
}

function overview(samples, transitions, from, unlisted) {
  const sum = (name) => samples.reduce((total, sample) => total + sample[name], 0);
  const changes = transitions.filter((transition) => transition.time >= from).length;
  const more = unlisted && changes === transitions.length; // those before the listed ones may belong to this time too
  const speedup = sum("plain") > 0 ? `, ${times(sum("plain") / sum("compared"))} of plain decoding` : "";
  return `${whole(sum("tokens"))} tokens in this time${speedup}; ${more ? "at least " : ""}${many(changes, "change")} of mode.`;
}

function latency({ ttft, itl }) {
  if (!ttft.count) return empty("No text was begun yet.");
  const row = (name, { p50, p90, p95, p99 }) => [name, ...[p50, p90, p95, p99].map(duration)];
  return table(["", "p50", "p90", "p95", "p99"], [row("First token", ttft), row("Between steps", itl)],
    { numeric: [1, 2, 3, 4], caption: "Latency: percentiles" });
}

function waste({ tokens, drafted, accepted, wasted }) {
  if (!drafted) return empty("No guess was checked yet.");
  const share = wasted / drafted;
  return [
    element("p", { class: "middle" }, element("strong", {}, whole(wasted)), ` of ${whole(drafted)} guesses since the start`),
    parts([{ share: 1 - share, name: "right" }, { share, name: "wasted" }], `${percent(share)} in vain`),
    element("p", { class: "under" }, `${percent(1 - share)} right, ${percent(share)} in vain; ${tokens ? (wasted / tokens).toFixed(2) : "–"} wasted per token written, ${whole(accepted)} accepted.`),
  ];
}

/** The earlier changes, and those of the later ones that are not among them. */
function merged(earlier, later) {
  const known = new Set(earlier.map((change) => JSON.stringify(change)));
  return [...earlier, ...later.filter((change) => !known.has(JSON.stringify(change)))];
}

function changes(transitions) {
  if (!transitions.length) return empty("No change of mode since the start.");
  const rows = [...transitions].reverse().map((change) => [
    clock(change.time),
    change.drafter,
    element("span", {}, element("span", { class: `tag mode-${change.before}` }, change.before), " → ", element("span", { class: `tag mode-${change.after}` }, change.after)),
    change.reason,
    change.speedup === null ? "not measured" : times(change.speedup),
    change.acceptance === null ? "–" : percent(change.acceptance),
    whole(change.requests),
  ]);
  return table(["Time", "Drafter", "Mode", "Reason", "Speed-up", "Acceptance", "Texts"], rows, { numeric: [4, 5, 6], caption: "Changes of mode" });
}

function requests(list) {
  if (!list.length) return empty("Nothing runs or waits.");
  const rows = list.map(({ seconds, texts, prompt_tokens, written, begun }) => [begun ? "running" : "waiting", duration(seconds), whole(prompt_tokens), whole(written), whole(texts)]);
  return table(["State", "For", "Prompt tokens", "Written", "Texts"], rows, { numeric: [1, 2, 3, 4], caption: "Requests" });
}

function weights(models) {
  if (!models.length) return empty("Not read yet.");
  return element("dl", { class: "weights" }, models.map(({ role, name, sha256 }) => [
    element("dt", {}, role),
    element("dd", {}, element("span", {}, name), element("code", { title: sha256 }, sha256.slice(0, 12))),
  ]));
}
