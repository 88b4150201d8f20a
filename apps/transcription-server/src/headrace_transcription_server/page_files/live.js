// The microphone, and the live session that it is sent to: what is said appears while it is said.

const RATE = 16_000;

export class Live {
  constructor(transcript, say) {
    this.transcript = transcript;
    this.say = say;
    this.waiting = [];
    this.isReady = false;
    this.isFinishing = false;
  }

  // Returns when the session is over; throws what went wrong.
  async run({ key, ...options }) {
    try {
      this.say("Asking for the microphone …");
      await this.listen();
      await this.converse(key, options);
    } finally {
      this.silence();
      this.socket?.close();
    }
  }

  finish() {
    if (this.isFinishing) return;
    this.isFinishing = true;
    this.silence();
    this.say("Finishing …");
    if (this.isReady) this.socket.send(JSON.stringify({ type: "finish" }));
  }

  abort() {
    this.silence();
    this.fail?.(new Error("Cancelled."));
  }

  // ---- the microphone ----

  async listen() {
    if (!navigator.mediaDevices) throw new Error("the browser gives the microphone only to https and localhost");
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    } catch (error) {
      throw new Error(`the microphone cannot be used (${error.message})`);
    }
    this.context = new AudioContext();
    await this.context.audioWorklet.addModule("/page/samples.js");
    const node = new AudioWorkletNode(this.context, "samples", { numberOfOutputs: 0, processorOptions: { rate: RATE } });
    node.port.onmessage = ({ data }) => this.send(data);
    this.context.createMediaStreamSource(this.stream).connect(node);
    await this.context.resume();
  }

  silence() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    if (this.context && this.context.state !== "closed") this.context.close();
  }

  // ---- the session ----

  converse(key, options) {
    return new Promise((resolve, reject) => {
      this.fail = reject;
      const protocols = ["headrace-live", ...(key ? [`openai-insecure-api-key.${key}`] : [])];
      const socket = (this.socket = new WebSocket(location.origin.replace(/^http/, "ws") + "/v1/audio/live", protocols));
      socket.binaryType = "arraybuffer";
      socket.onopen = () => socket.send(JSON.stringify({ type: "start", ...options }));
      socket.onmessage = ({ data }) => this.take(JSON.parse(data), resolve, reject);
      socket.onclose = () => reject(new Error("the server ended the session"));
      socket.onerror = () => reject(new Error("the server refuses the session, or cannot be reached"));
    });
  }

  take(event, resolve, reject) {
    const { transcript } = this;
    if (event.type === "ready") this.begin();
    if (event.type === "partial") {
      transcript.suggest(event.start, event.stable, event.text.slice(event.stable.length));
    }
    if (event.type === "final") transcript.add(event);
    if (event.type === "error") reject(new Error(event.error.message));
    if (event.type === "done") {
      Object.assign(transcript, { language: event.language, duration: event.duration });
      this.say(event.text ? `Done: ${event.duration.toFixed(1)} seconds.` : "Nothing was said.");
      resolve();
    }
  }

  begin() {
    this.isReady = true;
    for (const samples of this.waiting) this.socket.send(samples);
    this.waiting = [];
    if (this.isFinishing) this.socket.send(JSON.stringify({ type: "finish" }));
    else this.say("Listening …");
  }

  send(samples) {
    if (this.isFinishing) return;
    if (!this.isReady) this.waiting.push(samples);
    else if (this.socket.readyState === WebSocket.OPEN) this.socket.send(samples);
  }
}
