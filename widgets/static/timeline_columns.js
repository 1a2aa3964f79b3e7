// Spans and gaps as typed columns that grow, as the kernel sends them.
const SPAN_TYPES = {
  start: Float64Array, duration: Float32Array, tokens: Float32Array, bytes: Float32Array, run: Int32Array,
  stage: Uint16Array, lane: Uint16Array, rank: Uint16Array, role: Uint8Array, kind: Uint8Array, parent: Uint8Array,
  sublane: Uint8Array, depth: Uint8Array,
};
const GAP_TYPES = { lane: Uint16Array, start: Float64Array, duration: Float32Array, cause: Uint8Array };

class GrowingColumns {
  constructor(types) {
    this.types = types;
    this.count = 0;
    this.capacity = 1024;
    for (const [name, Type] of Object.entries(types)) this[name] = new Type(this.capacity);
  }

  // Keep the first `kept` rows, and put others behind them. buffers: one a column.
  append(kept, buffers) {
    const added = Object.values(this.types).map((Type, n) => new Type(bytesOf(buffers[n])));
    const count = kept + added[0].length;
    if (count > this.capacity) {
      this.capacity = Math.max(count, 2 * this.capacity);
      for (const [name, Type] of Object.entries(this.types)) {
        const larger = new Type(this.capacity);
        larger.set(this[name].subarray(0, kept));
        this[name] = larger;
      }
    }
    Object.keys(this.types).forEach((name, n) => this[name].set(added[n], kept));
    this.count = count;
  }
}

// A copy, as columns of eight bytes must begin at a multiple of eight.
function bytesOf(view) {
  if (view instanceof ArrayBuffer) return view;
  return view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
}

// What there is to draw: columns, names of what their numbers say, sections of time.
export class TimelineRecord {
  constructor() {
    this.spans = new GrowingColumns(SPAN_TYPES);
    this.gaps = new GrowingColumns(GAP_TYPES);
    this.sublanes = []; // by lane: the highest one
    this.kindsSeen = new Set();
  }

  // Whether it could be added: false where something before it was never received.
  take(data, buffers) {
    if (data.first > this.spans.count || data.same_gaps > this.gaps.count) return false;
    const spanBuffers = buffers.slice(0, Object.keys(SPAN_TYPES).length);
    this.spans.append(data.first, spanBuffers);
    this.gaps.append(data.same_gaps, buffers.slice(spanBuffers.length));
    if (data.first === 0) this.sublanes = [];
    const { lane, sublane, kind, count } = this.spans;
    for (let i = data.first; i < count; i++) {
      if (!(this.sublanes[lane[i]] >= sublane[i])) this.sublanes[lane[i]] = sublane[i];
      this.kindsSeen.add(kind[i]);
    }
    this.names = data;
    const last = data.end_s;
    this.sections = data.sections.map(([title, start, end]) => ({
      title, start, end: end === null ? Infinity : end, length: Math.max((end === null ? last : end) - start, 0),
    }));
    this.queue = data.kinds.findIndex(([kindName]) => kindName === "queue");
    this.transfer = data.kinds.findIndex(([kindName]) => kindName === "transfer");
    return true;
  }

  get length() {
    return Math.max(...this.sections.map((section) => section.length), 1e-6);
  }

  // The facts of a span in a few lines. section: whose start is 0.
  tellSpan(i, section) {
    const { spans, names } = this;
    const kind = names.kinds[spans.kind[i]][0];
    const parent = names.kinds[spans.parent[i]][0];
    const since = spans.start[i] - section.start;
    const device = names.lanes[spans.lane[i]][1];
    const lines = [
      `${names.stages[spans.stage[i]]}: ${kind}${parent ? ` in ${parent}` : ""}`,
      `${names.roles[spans.role[i]][0]} rank ${spans.rank[i]} on ${device}, run ${spans.run[i]}`,
      `${secondsSaid(spans.duration[i])} (from ${since.toFixed(3)} s to ${(since + spans.duration[i]).toFixed(3)} s)`,
    ];
    if (spans.tokens[i]) lines.push(`${Math.round(spans.tokens[i]).toLocaleString("en")} tokens`);
    if (spans.bytes[i]) lines.push(`${bytesSaid(spans.bytes[i])} moved`);
    return lines;
  }

  tellGap(i) {
    const { gaps, names } = this;
    return [
      `idle: ${names.causes[gaps.cause[i]][0]} (${names.causes[gaps.cause[i]][2]})`,
      `on ${names.lanes[gaps.lane[i]].join(" ")}`,
      secondsSaid(gaps.duration[i]),
    ];
  }
}

function secondsSaid(s) {
  if (s < 0.9995e-3) return `${(s * 1e6).toFixed(0)} us`;
  if (s < 0.9995) return `${(s * 1e3).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  return s < 59.5 ? `${s.toFixed(s < 9.95 ? 2 : 1)} s` : `${Math.floor(s / 60)} min ${(s % 60).toFixed(0)} s`;
}

function bytesSaid(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; n >= 999.5 && at < units.length - 1; at++) n /= 1000;
  return `${n.toFixed(at && n < 99.95 ? 1 : 0)} ${units[at]}`;
}
