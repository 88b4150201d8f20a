// The transcript on the page: segments with their times, words with theirs, and what may still change.

import { clock, types, write } from "./formats.js";

export class Transcript {
  constructor(root, downloads, onSeek) {
    this.root = root;
    this.buttons = [...downloads.querySelectorAll("button")];
    this.onSeek = onSeek;
    for (const button of this.buttons) button.addEventListener("click", () => this.download(button.dataset.format));
    this.clear("transcript");
  }

  clear(name) {
    this.name = name;
    this.language = "";
    this.duration = 0;
    this.segments = [];
    this.unsure = null;
    this.root.replaceChildren();
    for (const button of this.buttons) button.disabled = true;
  }

  get text() {
    return this.segments.map((one) => one.text).join("").trim();
  }

  add(segment) {
    this.segments.push(segment);
    this.settle();
    this.root.append(this.row(segment));
    this.follow();
  }

  // Text that may still change, after what is final.
  suggest(start, stable, rest) {
    this.settle();
    if (!stable && !rest) return;
    this.unsure = this.row({ start, text: "", words: [] });
    const words = this.unsure.lastChild;
    words.append(stable, Object.assign(document.createElement("span"), { className: "unsure", textContent: rest }));
    this.root.append(this.unsure);
    this.follow();
  }

  settle() {
    this.unsure?.remove();
    this.unsure = null;
  }

  finish() {
    this.settle();
    for (const button of this.buttons) button.disabled = !this.segments.length;
  }

  row(segment) {
    const row = document.createElement("p");
    row.className = "segment";
    const time = document.createElement("button");
    time.type = "button";
    time.textContent = clock(segment.start, ".").slice(3, -2);
    time.setAttribute("aria-label", `play from ${time.textContent}`);
    time.addEventListener("click", () => this.onSeek(segment.start));
    const words = document.createElement("span");
    words.append(...pieces(segment));
    row.append(time, words);
    return row;
  }

  follow() {
    this.root.scrollTop = this.root.scrollHeight;
  }

  download(format) {
    const { text, language, duration, segments } = this;
    const blob = new Blob([write(format, { text, language, duration, segments })], { type: types[format] });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${this.name}.${format}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}

// Words of the interface come without what is between them, which the text has: "well", "-known".
function pieces({ text, words }) {
  const found = [];
  let from = 0;
  for (const word of words ?? []) {
    const at = text.indexOf(word.word, from);
    if (at < 0) continue;
    found.push(text.slice(from, at), timed(word));
    from = at + word.word.length;
  }
  return [...found, text.slice(from)];
}

function timed(word) {
  const ruby = document.createElement("ruby");
  const time = document.createElement("rt");
  time.textContent = word.start.toFixed(2);
  ruby.append(word.word, time);
  ruby.title = `${word.start.toFixed(2)} to ${word.end.toFixed(2)} s`;
  return ruby;
}
