// The server's API: the key, errors, and streams.

const KEY = "outrider.key";

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const keep = (value) => sessionStorage.setItem(KEY, value);

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** An answer of the server; raises Refused with the server's own words. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body ? JSON.stringify(body) : undefined,
    signal,
    cache: "no-store",
  });
  if (answer.ok) return answer;
  let message = `the server answered with ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // no error object in it: the status has to do
  }
  throw new Refused(answer.status, message);
}

/** The objects of a stream of server-sent events, until [DONE]. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      waiting += value;
      const parts = waiting.split("\n\n");
      waiting = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refused(500, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
