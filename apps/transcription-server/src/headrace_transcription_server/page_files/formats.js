// A transcript as files. A segment is {start, end, text, words: [{word, start, end, probability}]}, times in seconds.

export const types = { txt: "text/plain", srt: "application/x-subrip", vtt: "text/vtt", json: "application/json" };

export function clock(seconds, point) {
  const ms = Math.round(seconds * 1000);
  const pad = (value, width = 2) => String(value).padStart(width, "0");
  const parts = [ms / 3_600_000, (ms / 60_000) % 60, (ms / 1000) % 60].map((value) => pad(Math.floor(value)));
  return parts.join(":") + point + pad(ms % 1000, 3);
}

export function write(format, transcript) {
  const { segments } = transcript;
  if (format === "json") return JSON.stringify(transcript, null, 2) + "\n";
  if (format === "srt") {
    return segments
      .map((one, index) => `${index + 1}\n${clock(one.start, ",")} --> ${clock(one.end, ",")}\n${line(one.text)}\n\n`)
      .join("");
  }
  if (format === "vtt") {
    const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
    return "WEBVTT\n\n" + segments
      .map((one) => `${clock(one.start, ".")} --> ${clock(one.end, ".")}\n${escaped(line(one.text))}\n\n`)
      .join("");
  }
  return transcript.text + "\n";
}

// A cue is one line, and must not hold what would end it.
function line(text) {
  return text.split(/\s+/).filter(Boolean).join(" ").replaceAll("-->", "->");
}
