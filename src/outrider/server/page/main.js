// What runs the page: the theme, the key, and a question to the server each second.

import { Refused, ask, keep, key } from "/dashboard/api.js";
import { byId, say } from "/dashboard/elements.js";
import { Live } from "/dashboard/live.js";
import { Playground } from "/dashboard/playground.js";

const EVERY = 1000; // ms
const THEMES = ["auto", "light", "dark"];

function theme() {
  const button = byId("theme");
  const show = (name) => {
    button.textContent = `Theme: ${name}`;
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  };
  show(THEMES.includes(localStorage.getItem("outrider.theme")) ? localStorage.getItem("outrider.theme") : "auto");
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
    localStorage.setItem("outrider.theme", next);
    show(next);
  });
}

class KeyDialog {
  constructor(changed) {
    this.dialog = byId("key-dialog");
    this.refused = false; // the person closed it: do not open it again by ourselves
    byId("key-open").addEventListener("click", () => this.open(""));
    byId("key-cancel").addEventListener("click", () => this.close());
    this.dialog.addEventListener("cancel", () => (this.refused = true));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      keep(byId("key").value.trim());
      byId("key").value = "";
      this.refused = false;
      this.dialog.close();
      changed();
    });
  }

  close() {
    this.refused = true;
    this.dialog.close();
  }

  open(wrong) {
    byId("key-open").hidden = false;
    byId("key-wrong").hidden = !wrong;
    say("key-wrong", wrong);
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** The server wants a key, or another one. */
  asked(message) {
    byId("key-open").hidden = false;
    if (!this.refused) this.open(key() ? `${message}.` : "");
  }
}

class Poll {
  constructor(live, playground) {
    this.live = live;
    this.playground = playground;
    this.timer = null;
    this.keys = new KeyDialog(() => this.now());
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(this.timer) : this.now()));
  }

  async now() {
    clearTimeout(this.timer);
    try {
      const state = await (await ask(`/dashboard/state?since=${this.live.next}`)).json();
      this.live.show(state);
      this.playground.offer(state);
      byId("key-open").hidden = !key();
      this.tell("live", state.server.draining ? "shutting down" : "live", "");
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        this.tell("lost", "key needed", "The figures and the playground need an API key.");
        this.keys.asked(error.message);
        return; // a key, or the button, asks again
      }
      const gone = !(error instanceof Refused);
      this.tell("lost", gone ? "no answer" : "refused", gone ? "The server does not answer. Trying again." : error.message);
    }
    if (!document.hidden) this.timer = setTimeout(() => this.now(), EVERY);
  }

  tell(state, word, notice) {
    byId("status").dataset.state = state;
    const [, text] = byId("status").children;
    if (text.textContent !== word) text.textContent = word;
    byId("notice").hidden = !notice;
    say("notice", notice);
  }
}

theme();
const live = new Live();
const playground = new Playground(() => live.plain());
const poll = new Poll(live, playground);
playground.refused = (error) => error.status === 401 && poll.keys.open(`${error.message}.`);
poll.now();
