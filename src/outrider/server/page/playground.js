// A prompt, its answer with each token in the colour of its writer, and the same text decoded plainly.

import { Refused, ask, events } from "/dashboard/api.js";
import { byId, duration, element, many, percent, rate, say, times, whole } from "/dashboard/elements.js";
import { colour } from "/dashboard/live.js";

const CODE = `class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("The amount must be positive.")
        self.balance = self.balance + amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("The balance is too low.")
        self.balance = self.balance - amount`;
const EXAMPLES = [
  ["Edit code", `Write this class again with the name BankAccount.\n\n\`\`\`python\n${CODE}\n\`\`\``],
  ["Explain", "Why is the sky blue, and why is it red in the evening?"],
  ["List", "Write a numbered list of ten rivers, each with its country."],
];
const MEANING = {
  drafted: "guessed, and right",
  corrected: "the model's own, after a wrong guess",
  bonus: "the model's own, after guesses that were all right",
  plain: "the model's own, nothing was guessed",
};

/** Seconds per token after the first; null for a text of one token. */
const pace = ({ timings, tokens }) => (timings && tokens > 1 ? (timings.total - timings.ttft) / (tokens - 1) : null);

export class Playground {
  constructor(plain) {
    this.plain = plain; // tokens per second of plain decoding, as the server measures them meanwhile
    this.refused = () => {};
    this.running = null;
    this.steps = [];
    byId("examples").append(...EXAMPLES.map(([name, text]) => {
      const button = element("button", { type: "button", class: "chip" }, name);
      button.addEventListener("click", () => {
        byId("prompt").value = text;
        byId("prompt").focus();
      });
      return button;
    }));
    byId("prompt").value = EXAMPLES[0][1];
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.running) this.run();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    const steps = byId("steps");
    steps.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: this.chosen - 1, ArrowRight: this.chosen + 1, Home: 0, End: this.steps.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.choose(Math.min(Math.max(to, 0), this.steps.length - 1));
    });
    for (const place of [steps, byId("text")]) {
      place.addEventListener("pointerover", (event) => {
        const step = event.target.dataset.step;
        if (step !== undefined) this.choose(Number(step));
      });
    }
    this.chosen = -1;
  }

  /** What the server offers, once it is known. */
  offer({ server, drafters }) {
    this.model = server.name;
    const select = byId("drafter");
    if (select.options.length) return;
    const offered = drafters.offered.filter((name) => name !== "prediction" && name !== drafters.own);
    select.append(element("option", { value: "" }, `${drafters.own} (default)`), ...offered.map((name) => element("option", { value: name }, name)));
    if (!server.chat) {
      byId("form").value = "text";
      byId("form").options[0].disabled = true;
    }
  }

  async run() {
    if (!this.model) {
      this.verdict("The server has not answered yet.", "wrong");
      return;
    }
    const wanted = this.wanted();
    this.running = new AbortController();
    this.begin();
    try {
      const drafted = await this.write(wanted, true);
      this.race(drafted, null);
      if (byId("compare").checked) {
        this.verdict("Decoding the same text plainly …", "");
        const plain = await this.write({ ...wanted, speculation: { enabled: false, trace: true } }, false, drafted);
        this.race(drafted, plain);
        this.compare(drafted, plain);
      } else {
        this.verdict(this.guess(drafted), "");
      }
    } catch (error) {
      if (error.name === "AbortError") this.verdict("Stopped.", "");
      else {
        this.verdict(error instanceof Refused ? error.message : "The connection was lost.", "wrong");
        if (error instanceof Refused) this.refused(error);
      }
    } finally {
      this.running = null;
      byId("run").disabled = false;
      byId("stop").hidden = true;
    }
  }

  wanted() {
    const text = byId("prompt").value;
    const speculation = { trace: true, verify: "match" };
    if (byId("drafter").value) speculation.drafter = byId("drafter").value;
    return {
      model: this.model,
      ...(byId("form").value === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
      seed: Number(byId("seed").value),
      stream: true,
      stream_options: { include_usage: true },
      speculation,
    };
  }

  begin() {
    this.steps = [];
    this.chosen = -1;
    byId("run").disabled = true;
    byId("stop").hidden = false;
    byId("verdict").hidden = true;
    byId("race").hidden = true;
    byId("steps-block").hidden = true;
    byId("text").replaceChildren(element("p", { class: "empty" }, "The model reads the prompt …"));
    byId("legend").replaceChildren();
    byId("steps").replaceChildren();
    say("step-told", "Choose a step to see its guesses.");
  }

  /** Stream an answer; `shown`: into the page. `before`: the run to race against. */
  async write(body, shown, before = null) {
    const path = body.messages ? "/v1/chat/completions" : "/v1/completions";
    const answer = await ask(path, { body, signal: this.running.signal });
    const run = { text: "", spans: [], steps: [], tokens: 0, timings: null, counts: {}, began: null };
    for await (const event of events(answer)) {
      const choice = event.choices[0];
      if (!choice) continue;
      run.text += choice.delta?.content ?? choice.text ?? "";
      const told = choice.outrider;
      if (!told) continue;
      run.began ??= performance.now();
      run.tokens += told.steps.reduce((sum, step) => sum + step.tokens, 0);
      run.steps.push(...told.steps);
      run.timings = told.timings ?? run.timings;
      for (const span of told.spans) {
        const name = span.source ?? span.origin;
        run.counts[name] = (run.counts[name] ?? 0) + 1;
      }
      if (shown) this.add(told, run);
      this.race(shown ? run : before, shown ? null : run);
    }
    return run;
  }

  add({ spans, steps }, run) {
    byId("text").querySelector(".empty")?.remove();
    byId("text").append(...spans.map((span) => element("span", {
      class: span.origin === "drafted" ? `token drafted ${colour(span.source)}` : `token ${span.origin}`,
      "data-step": span.step,
      title: span.origin === "drafted" ? `${span.source}: ${MEANING.drafted}` : MEANING[span.origin],
    }, span.text)));
    byId("text").scrollTop = byId("text").scrollHeight;
    const list = byId("steps");
    byId("steps-block").hidden = false;
    for (const step of steps) {
      const bar = element("span", { class: "step", "data-step": this.steps.length });
      const blocks = Math.min(step.tokens, 12);
      for (let index = 0; index < blocks; index += 1) bar.append(element("i", { class: index < step.accepted ? "accepted" : "own", "data-step": this.steps.length }));
      list.append(bar);
      this.steps.push(step);
    }
    list.setAttribute("aria-valuemax", String(this.steps.length));
    const drafted = run.steps.reduce((sum, step) => sum + step.drafted, 0);
    const accepted = run.steps.reduce((sum, step) => sum + step.accepted, 0);
    say("steps-summary", `${(run.tokens / run.steps.length).toFixed(2)} per step on average` + (drafted ? `; ${percent(accepted / drafted)} of ${many(drafted, "guess", "guesses")} accepted` : ""));
    this.legend(run.counts);
  }

  legend(counts) {
    const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
    const own = ["corrected", "bonus", "plain"];
    const names = [...Object.keys(counts).filter((name) => !own.includes(name)).sort(), ...own.filter((name) => counts[name])];
    byId("legend").replaceChildren(...names.map((name) => element("span", { class: "entry" },
      element("span", { class: own.includes(name) ? `token ${name}` : `token drafted ${colour(name)}` }, own.includes(name) ? "model" : name),
      ` ${percent(counts[name] / total)} `, element("span", { class: "under" }, MEANING[own.includes(name) ? name : "drafted"]))));
  }

  /** Two bars on one scale of time: the answer, and the same text decoded plainly. */
  race(drafted, plain) {
    const seconds = (run) => run?.timings ? run.timings.total - run.timings.ttft : run?.began ? (performance.now() - run.began) / 1000 : 0;
    const longest = Math.max(seconds(drafted), seconds(plain), 0.001);
    const lane = (name, run, kind) => {
      const speed = run && run.tokens > 1 && seconds(run) > 0 ? `${rate((run.tokens - 1) / seconds(run))} tokens/s` : "…";
      const bar = element("span", { class: `lane ${kind}` }, element("i"));
      bar.firstChild.style.inlineSize = `${(100 * seconds(run)) / longest}%`;
      return [element("span", { class: "runner" }, name), bar, element("span", { class: "pace" }, element("b", {}, speed), ` ${duration(seconds(run))}`)];
    };
    byId("race").hidden = false;
    byId("race").replaceChildren(...lane("speculative", drafted, "fast"), ...(plain ? lane("plain", plain, "slow") : []));
  }

  compare(drafted, plain) {
    if (drafted.text !== plain.text) {
      let at = 0;
      while (drafted.text[at] === plain.text[at]) at += 1;
      this.verdict(`The two texts differ from character ${whole(at + 1)} on. That must not happen: please report it.`, "wrong");
      return;
    }
    const ours = pace(drafted);
    const theirs = pace(plain);
    const speedup = ours && theirs ? `${times(theirs / ours)} the speed of plain decoding` : "too short to time";
    this.verdict(`${speedup}. The texts are identical: all ${many(drafted.text.length, "character")}, ${many(drafted.tokens, "token")}. First token after ${duration(drafted.timings?.ttft)}, plainly ${duration(plain.timings?.ttft)}.`, "good");
  }

  /** Against the plain speed that the server measures while it works. */
  guess(drafted) {
    const ours = pace(drafted);
    const plain = this.plain();
    const told = `First token after ${duration(drafted.timings?.ttft)}.`;
    if (!ours || !plain) return `${told} There is no live baseline to compare with yet; compare with a plain run instead.`;
    return `${times(1 / ours / plain)} the speed of plain decoding as the server measures it meanwhile (${rate(plain)} tokens/s). ${told}`;
  }

  verdict(text, kind) {
    byId("verdict").hidden = false;
    byId("verdict").dataset.kind = kind;
    say("verdict", text);
  }

  choose(step) {
    if (step === this.chosen || !this.steps[step]) return;
    this.chosen = step;
    for (const node of document.querySelectorAll("#text .chosen, #steps .chosen")) node.classList.remove("chosen");
    for (const node of document.querySelectorAll(`#text [data-step="${step}"], #steps .step[data-step="${step}"]`)) node.classList.add("chosen");
    const { tokens, drafted, accepted, drafter } = this.steps[step];
    const told = `Step ${step + 1} of ${this.steps.length}: ` +
      (drafted ? `${drafter} guessed ${many(drafted, "token")}, ${whole(accepted)} accepted; ${many(tokens, "token")} in one forward of the model.` : `nothing was guessed; ${many(tokens, "token")}.`);
    say("step-told", told);
    byId("steps").setAttribute("aria-valuenow", String(step + 1));
    byId("steps").setAttribute("aria-valuetext", told);
  }
}
