// What the page does: a file is sent and its answer read as it comes; the microphone goes to a live session.

import { Live } from "./live.js";
import { Transcript } from "./transcript.js";

const find = (id) => document.getElementById(id);
const player = find("player");
const transcript = new Transcript(find("transcript"), find("downloads"), (seconds) => {
  if (player.hidden) return;
  player.currentTime = seconds;
  player.play();
});

let key = sessionStorage.getItem("headrace-key") ?? "";
let running = null;

// ---- the server -------------------------------------------------------------------------------------------------

async function call(path, options = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  if (response.ok) return response;
  if (response.status === 401) find("key-form").hidden = false;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      if (data.trim() && data.trim() !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function showModel() {
  try {
    const { model } = await (await call("/v1")).json();
    find("model").textContent = model;
    find("key-form").hidden = true;
  } catch (error) {
    say(error.message, true);
  }
}

function options() {
  const language = find("language").value.trim();
  const vocabulary = find("vocabulary").value.trim();
  return { ...(language && { language }), ...(vocabulary && { vocabulary }) };
}

// ---- a file -----------------------------------------------------------------------------------------------------

async function transcribe(file) {
  if (running) return;
  const cancelling = (running = new AbortController());
  begin(file.name.replace(/\.[^.]*$/, "") || "transcript");
  player.src = URL.createObjectURL(file);
  player.hidden = false;
  const form = new FormData();
  for (const [name, value] of Object.entries(options())) form.append(name, value);
  form.append("model", find("model").textContent || "whisper");
  form.append("response_format", "verbose_json");
  form.append("timestamp_granularities[]", "word");
  form.append("stream", "true");
  form.append("file", file);
  const path = find("translate").checked ? "/v1/audio/translations" : "/v1/audio/transcriptions";
  try {
    say(`Sending ${file.name} …`);
    const response = await call(path, { method: "POST", body: form, signal: cancelling.signal });
    let isDone = false;
    for await (const event of events(response)) isDone = take(event) || isDone;
    if (!isDone) throw new Error("the connection ended before the transcript did");
  } catch (error) {
    say(error.name === "AbortError" ? "Cancelled." : error.message, error.name !== "AbortError");
  } finally {
    end();
  }
}

function take(event) {
  if (event.type === "error") throw new Error(event.error?.message ?? "the server failed");
  if (event.type === "transcript.progress") {
    find("progress").value = event.duration ? event.position / event.duration : 0;
    say(`${Math.floor(event.position)} of ${Math.ceil(event.duration)} seconds`);
  }
  if (event.type === "transcript.text.delta") {
    transcript.add({ start: event.start, end: event.end, text: event.delta, words: event.words ?? [] });
  }
  if (event.type !== "transcript.text.done") return false;
  transcript.language = event.language;
  transcript.duration = event.duration;
  const seconds = event.headrace?.timings?.total;
  say(event.text ? `Done: ${event.duration.toFixed(1)} seconds of audio in ${seconds.toFixed(1)} seconds.` : "Nobody speaks in it.");
  return true;
}

// ---- speaking ---------------------------------------------------------------------------------------------------

async function speak() {
  if (running instanceof Live) return running.finish();
  if (running) return;
  begin("dictation");
  player.hidden = true;
  find("progress").hidden = true;
  const live = (running = new Live(transcript, say));
  press(true);
  try {
    await live.run({ ...options(), task: find("translate").checked ? "translate" : "transcribe", key });
  } catch (error) {
    say(error.message, error.message !== "Cancelled.");
  } finally {
    press(false);
    end();
  }
}

function press(isOn) {
  find("speak").setAttribute("aria-pressed", String(isOn));
  find("speak-label").textContent = isOn ? "Stop" : "Speak";
}

// ---- the page ---------------------------------------------------------------------------------------------------

function say(text, hasFailed = false) {
  find("status").textContent = text;
  find("status").classList.toggle("failed", hasFailed);
}

function begin(name) {
  transcript.clear(name);
  URL.revokeObjectURL(player.src);
  find("progress").value = 0;
  find("progress").hidden = find("cancel").hidden = false;
}

function end() {
  running = null;
  transcript.finish();
  find("file").value = "";
  find("progress").hidden = find("cancel").hidden = true;
}

find("file").addEventListener("change", (event) => event.target.files[0] && transcribe(event.target.files[0]));
find("speak").addEventListener("click", speak);
find("cancel").addEventListener("click", () => running?.abort());
find("word-times").addEventListener("change", (event) => find("transcript").classList.toggle("timed", event.target.checked));
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  sessionStorage.setItem("headrace-key", key);
  say("Ready.");
  showModel();
});

const drop = find("drop");
for (const name of ["dragenter", "dragover"]) {
  drop.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
}
for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
drop.addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files[0]) transcribe(event.dataTransfer.files[0]);
});

showModel();
