// Reading streams of text. Pure: no network, no document.

const MAX_PENDING = 1 << 24; // characters of one line or event; a server that sends more is ill

/** Cuts text that arrives in any pieces into lines without their ends. */
export class LineReader {
  #pending = "";

  *push(text) {
    this.#pending += text;
    let start = 0;
    for (;;) {
      const end = this.#pending.indexOf("\n", start);
      if (end < 0) break;
      yield this.#pending.slice(start, this.#pending[end - 1] === "\r" ? end - 1 : end);
      start = end + 1;
    }
    this.#pending = this.#pending.slice(start);
    if (this.#pending.length > MAX_PENDING) throw new Error("The server sent an endless line.");
  }
}

/** The data of server-sent events: several `data:` lines are one text, comments are dropped. */
export class EventReader {
  #lines = new LineReader();
  #data = [];

  *push(text) {
    for (const line of this.#lines.push(text)) {
      if (line === "") {
        if (this.#data.length) yield this.#data.join("\n");
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  }
}

/** The text of a response's body, as it arrives; characters are never split. */
export async function* textOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const text = decoder.decode(value, { stream: true });
      if (text) yield text;
    }
  } finally {
    // Whoever stops reading ends the request.
    reader.cancel().catch(() => {});
  }
}
