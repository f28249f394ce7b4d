// Reading streams of text. Pure: no network, no document.

const MAX_PENDING = 1 << 24; // characters of one line or event; a server that sends more is ill

/** Cuts text that arrives in any pieces into lines without their ends. */
export class LineReader {
  #pieces = []; // of the line that has not ended yet
  #length = 0;

  *push(text) {
    let start = 0;
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", start)) {
      const line = this.#pieces.join("") + text.slice(start, end);
      this.#pieces = [];
      this.#length = 0;
      start = end + 1;
      yield line.endsWith("\r") ? line.slice(0, -1) : line;
    }
    if (start === text.length) return;
    this.#pieces.push(text.slice(start));
    this.#length += text.length - start;
    if (this.#length > MAX_PENDING) throw new RangeError("an endless line");
  }
}

/** The data of server-sent events: several `data:` lines are one text, comments are dropped. */
export class EventReader {
  #lines = new LineReader();
  #data = [];
  #length = 0;

  *push(text) {
    for (const line of this.#lines.push(text)) {
      if (line === "") {
        if (this.#data.length) yield this.#data.join("\n");
        this.#data = [];
        this.#length = 0;
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
        this.#length += line.length;
        if (this.#length > MAX_PENDING) throw new RangeError("an endless event");
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
