// Runs on the audio thread: one channel of the microphone at the rate that is wanted, in pieces of an eighth of a second.
// Each sample is the mean of what it stands for, which keeps most of what is too high for the new rate out.

class Samples extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.step = sampleRate / processorOptions.rate;
    this.piece = new Float32Array(processorOptions.rate / 8);
    this.filled = 0;
    this.sum = 0;
    this.weight = 0;
  }

  process([input]) {
    for (const sample of input[0] ?? []) this.take(sample);
    return true;
  }

  // A sample may end one mean and begin the next.
  take(sample) {
    const room = this.step - this.weight;
    if (room > 1) {
      this.sum += sample;
      this.weight += 1;
      return;
    }
    this.put((this.sum + sample * room) / this.step);
    this.weight = 1 - room;
    this.sum = sample * this.weight;
  }

  put(value) {
    this.piece[this.filled++] = value;
    if (this.filled < this.piece.length) return;
    this.port.postMessage(this.piece.slice());
    this.filled = 0;
  }
}

registerProcessor("samples", Samples);
