// Draws a record of spans on a canvas, and says what lies under a point of it.
const ROW = 33; // heights, pixels
const BAR = 26;
const STRIP = 9;
const QUEUE_LINE = 3;
const GAP_BELOW = 7;
const HEAD = 20;
const AXIS = 20;
const WIDEST_LABEL = 170;
const HATCHED = 5; // pixels: what is narrower shows no hatch, and is filled evenly, which is much quicker
const FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif";

export class TimelineCanvas {
  constructor(canvas, record) {
    this.canvas = canvas;
    this.record = record;
    this.context = canvas.getContext("2d");
    this.from = 0; // seconds from the start of a section, at the left edge
    this.to = 1;
    this.marked = -1; // the span that the keyboard is on
    this.chosen = -1;
    this.patterns = new Map();
  }

  get left() {
    return this.labelWidth;
  }

  get plotWidth() {
    return Math.max(this.width - this.labelWidth - 8, 1);
  }

  x(seconds) {
    return this.left + ((seconds - this.from) / (this.to - this.from)) * this.plotWidth;
  }

  seconds(x) {
    return this.from + ((x - this.left) / this.plotWidth) * (this.to - this.from);
  }

  // Where lanes lie: `rows`, and their y by section and lane.
  place() {
    const { record, context } = this;
    const { lanes, order } = record.names;
    context.font = `12px ${FONT}`;
    const widest = Math.max(0, ...lanes.flat().map((name) => context.measureText(name).width));
    this.labelWidth = Math.min(widest + 28, WIDEST_LABEL);
    this.rows = [];
    this.heads = [];
    this.tops = record.sections.map(() => new Float32Array(lanes.length).fill(-1));
    this.tracks = record.sections.map(() => new Int32Array(lanes.length));
    this.trackCount = 0;
    let y = 4;
    record.sections.forEach((section, s) => {
      if (record.sections.length > 1) {
        this.heads.push({ y, text: section.title, whole: true });
        y += HEAD;
      }
      let pool = null;
      for (const lane of order) {
        if (lanes[lane][0] !== pool) {
          pool = lanes[lane][0];
          this.heads.push({ y, text: `pool ${pool}`, whole: false });
          y += HEAD;
        }
        const sublanes = 1 + (record.sublanes[lane] || 0);
        this.rows.push({ section: s, lane, y, height: ROW * sublanes });
        this.tops[s][lane] = y;
        this.tracks[s][lane] = this.trackCount;
        this.trackCount += 3 * sublanes + 1; // three depths a sub-lane, and the gaps
        y += ROW * sublanes + GAP_BELOW;
      }
    });
    this.bottom = y;
    this.height = y + AXIS;
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    if (!this.width || !this.record.names) return false;
    this.place();
    const sizes = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    this.canvas.style.height = `${this.height}px`;
    if (this.canvas.width !== sizes[0]) this.canvas.width = sizes[0];
    if (this.canvas.height !== sizes[1]) this.canvas.height = sizes[1];
    const { context } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const text = getComputedStyle(this.canvas).color;
    if (this.text !== text || this.ratio !== ratio) this.patterns.clear();
    this.text = text;
    this.ratio = ratio;
    this.drawNames();
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.plotWidth, this.bottom);
    context.clip();
    // what is narrower than a pixel is drawn by the pixel: one code for each of a track
    this.pixels = Math.ceil(this.plotWidth);
    this.narrow = new Uint16Array(this.trackCount * this.pixels);
    this.labels = [];
    this.record.sections.forEach((section, s) => this.drawGaps(section, s));
    this.drawNarrow(true);
    this.narrow.fill(0);
    for (const depth of [0, 1, 2]) {
      this.record.sections.forEach((section, s) => this.drawSpans(section, s, depth));
      this.drawNarrow(false);
      this.narrow.fill(0);
    }
    this.drawLabels();
    this.drawMarks();
    context.restore();
    return true;
  }

  drawNames() {
    const { context, record } = this;
    context.fillStyle = this.text;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const { y, text, whole } of this.heads) {
      context.font = `600 ${whole ? 13 : 12}px ${FONT}`;
      context.fillText(text, whole ? 4 : 8, y + HEAD / 2);
      if (whole) context.fillRect(4, y + HEAD - 2, this.width - 12, 1);
    }
    context.font = `12px ${FONT}`;
    for (const row of this.rows) {
      context.fillText(record.names.lanes[row.lane][1], 16, row.y + row.height / 2, this.labelWidth - 20);
      context.globalAlpha = 0.06;
      context.fillRect(this.left, row.y, this.plotWidth, row.height);
      context.globalAlpha = 1;
    }
    const step = niceStep(((this.to - this.from) / this.plotWidth) * 90);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    context.textAlign = "center";
    for (let n = Math.ceil(this.from / step - 1e-9); n * step <= this.to; n++) {
      const x = this.x(n * step);
      context.globalAlpha = 0.16;
      context.fillRect(x, 0, 1, this.bottom);
      context.globalAlpha = 1;
      context.fillText(`${(n * step).toFixed(digits)} s`, Math.min(x, this.width - 24), this.bottom + AXIS / 2);
    }
  }

  // Left and right edge of a time in a section, in pixels, or null where none of it is in sight.
  edges(section, start, duration) {
    const end = start + duration;
    if (start >= section.end || end < section.start) return null;
    const left = this.x(Math.max(start, section.start) - section.start);
    const right = this.x(Math.min(end, section.end) - section.start);
    return right < this.left || left > this.left + this.plotWidth ? null : [left, right];
  }

  drawGaps(section, s) {
    const { gaps, names, sublanes } = this.record;
    for (let i = 0; i < gaps.count; i++) {
      const edges = this.edges(section, gaps.start[i], gaps.duration[i]);
      if (!edges) continue;
      const lane = gaps.lane[i];
      const top = this.tops[s][lane];
      if (top < 0) continue;
      const [left, right] = edges;
      const sublaneCount = 1 + (sublanes[lane] || 0);
      if (right - left < 1) {
        this.putNarrow(this.tracks[s][lane] + 3 * sublaneCount, left, gaps.cause[i] + 1);
        continue;
      }
      const [, , letter] = names.causes[gaps.cause[i]];
      this.drawGap(left, right, top, ROW * sublaneCount, gaps.cause[i]);
      const seen = [Math.max(left, this.left), Math.min(right, this.left + this.plotWidth)];
      if (seen[1] - seen[0] >= 12) {
        const middle = top + (ROW * sublaneCount) / 2;
        this.labels.push({ x: (seen[0] + seen[1]) / 2, y: middle, letter, ink: this.text, style: "italic" });
      }
    }
  }

  drawGap(left, right, top, height, cause) {
    const { context } = this;
    const even = right - left < HATCHED;
    context.globalAlpha = even ? 0.16 : 1;
    context.fillStyle = even ? this.text : this.pattern(this.record.names.causes[cause][1], this.text, 0.05, 0.4);
    context.fillRect(left, top, right - left, height);
    context.globalAlpha = 1;
  }

  drawSpans(section, s, wanted) {
    const { context, record } = this;
    const { spans, names } = record;
    const tracks = this.tracks[s];
    const tops = this.tops[s];
    // nothing outside these can be in sight: the test that most spans fail must be a cheap one
    const first = section.start + this.from;
    const last = Math.min(section.start + this.to, section.end);
    for (let i = 0; i < spans.count; i++) {
      const start = spans.start[i];
      if (spans.depth[i] !== wanted || start > last || start + spans.duration[i] < first) continue;
      const edges = this.edges(section, start, spans.duration[i]);
      const lane = spans.lane[i];
      if (!edges || tops[lane] < 0) continue;
      const [left, right] = edges;
      const kind = spans.kind[i];
      const role = names.roles[spans.role[i]];
      const top = tops[lane] + ROW * spans.sublane[i];
      if (kind === record.queue) {
        context.fillStyle = role[1];
        context.fillRect(left, top + 3 + BAR, Math.max(right - left, 0.5), QUEUE_LINE);
        continue;
      }
      if (right - left < 1) {
        this.putNarrow(tracks[lane] + 3 * spans.sublane[i] + wanted, left, ((wanted ? 1 : kind + 1) << 8) | spans.role[i]);
        continue;
      }
      this.drawBar(left, right, top, wanted, kind, role);
      if (wanted === 0 && kind !== record.transfer && right - left >= 11) {
        const seen = Math.max(left, this.left);
        const room = Math.min(right, this.left + this.plotWidth) - seen;
        const label = { y: top + 2 + (BAR - STRIP) / 2, letter: role[2], ink: role[3], style: "bold" };
        if (room >= 11) this.labels.push({ x: seen + 3, room, name: names.stages[spans.stage[i]], ...label });
      }
    }
  }

  drawBar(left, right, top, depth, kind, role) {
    const { context, record } = this;
    const [, hatch, ground] = record.names.kinds[kind];
    const height = depth === 0 ? BAR : depth === 1 ? STRIP : STRIP - 4;
    const even = depth > 0 && right - left < HATCHED;
    if (even) [context.fillStyle, context.globalAlpha] = [role[3], 0.5];
    else if (depth > 0) context.fillStyle = this.pattern(hatch, role[3], ground, 1);
    else context.fillStyle = kind === record.transfer ? this.pattern(hatch, role[1], ground, 1) : role[1];
    // a hair of ground between bars that touch, where there is room for it
    const width = right - left > 4 ? right - left - 0.5 : right - left;
    context.fillRect(left, top + 2 + BAR - height, width, height);
    context.globalAlpha = 1;
  }

  putNarrow(track, x, code) {
    const pixel = Math.min(Math.max(Math.floor(x - this.left), 0), this.pixels - 1);
    this.narrow[track * this.pixels + pixel] = code;
  }

  // Neighbours with the same code are one rectangle.
  drawNarrow(gaps) {
    const { record, pixels, narrow } = this;
    for (const row of this.rows) {
      const sublanes = row.height / ROW;
      const base = this.tracks[row.section][row.lane];
      const [firstTrack, lastTrack] = gaps ? [3 * sublanes, 3 * sublanes + 1] : [0, 3 * sublanes];
      for (let track = firstTrack; track < lastTrack; track++) {
        const offset = (base + track) * pixels;
        for (let at = 0; at < pixels; at++) {
          const code = narrow[offset + at];
          if (!code) continue;
          const begin = at;
          while (at + 1 < pixels && narrow[offset + at + 1] === code) at++;
          const [left, right] = [this.left + begin, this.left + at + 1];
          if (gaps) {
            this.drawGap(left, right, row.y, row.height, code - 1);
          } else {
            const top = row.y + ROW * Math.floor(track / 3);
            this.drawBar(left, right, top, track % 3, (code >> 8) - 1, record.names.roles[code & 255]);
          }
        }
      }
    }
  }

  drawLabels() {
    const { context } = this;
    context.textBaseline = "middle";
    for (const { x, y, letter, ink, style, name, room } of this.labels) {
      context.fillStyle = ink;
      context.font = `${style} 11px ${FONT}`;
      context.textAlign = name === undefined ? "center" : "left";
      context.fillText(letter, x, y);
      if (name === undefined) continue;
      const shown = fitting(name, Math.floor((room - 18) / 6.1));
      context.font = `11px ${FONT}`;
      if (shown) context.fillText(shown, x + 12, y);
    }
  }

  drawMarks() {
    for (const [i, dashes] of [[this.chosen, []], [this.marked, [3, 2]]]) {
      if (i < 0 || i >= this.record.spans.count) continue;
      for (const [left, right, top, height] of this.boxesOf(i)) {
        this.context.strokeStyle = this.text;
        this.context.lineWidth = 2;
        this.context.setLineDash(dashes);
        this.context.strokeRect(left - 1, top - 1, Math.max(right - left, 1) + 2, height + 2);
      }
    }
    this.context.setLineDash([]);
  }

  boxesOf(i) {
    const { spans, sections, queue } = this.record;
    return sections.flatMap((section, s) => {
      const edges = this.edges(section, spans.start[i], spans.duration[i]);
      const top = this.tops[s][spans.lane[i]] + ROW * spans.sublane[i];
      if (!edges || top < 0) return [];
      if (spans.kind[i] === queue) return [[...edges, top + 3 + BAR, QUEUE_LINE]];
      const height = [BAR, STRIP, STRIP - 4][spans.depth[i]];
      return [[...edges, top + 2 + BAR - height, height]];
    });
  }

  // What lies under a point: `{section, span}`, `{section, gap}`, or null.
  under(x, y) {
    const row = this.rows && this.rows.find((lane) => y >= lane.y && y < lane.y + lane.height);
    if (!row || x < this.left || x > this.left + this.plotWidth) return null;
    const { spans, gaps, sections, queue } = this.record;
    const section = sections[row.section];
    const time = section.start + this.seconds(x);
    const slack = (this.to - this.from) / this.plotWidth;
    const sublane = Math.floor((y - row.y) / ROW);
    const within = (y - row.y) % ROW;
    let best = -1;
    for (let i = 0; i < spans.count; i++) {
      if (spans.lane[i] !== row.lane || spans.sublane[i] !== sublane) continue;
      if (spans.start[i] - slack > time || spans.start[i] + spans.duration[i] + slack < time) continue;
      const [low, high] = spans.kind[i] === queue ? [3 + BAR, ROW] : [2 + BAR - [BAR, STRIP, STRIP - 4][spans.depth[i]], 2 + BAR];
      if (within < low || within > high) continue;
      const better = best < 0 || spans.depth[i] > spans.depth[best] ||
        (spans.depth[i] === spans.depth[best] && spans.start[i] <= time && spans.start[i] >= spans.start[best]);
      if (better) best = i;
    }
    if (best >= 0) return { section, span: best };
    for (let i = 0; i < gaps.count; i++) {
      if (gaps.lane[i] === row.lane && gaps.start[i] <= time && time <= gaps.start[i] + gaps.duration[i]) {
        return { section, gap: i };
      }
    }
    return null;
  }

  // A tile of 6 x 6 pixels, repeated: a hatch on a ground of the same colour.
  pattern(hatch, colour, ground, alpha) {
    const key = `${hatch} ${colour} ${ground} ${alpha}`;
    if (!this.patterns.has(key)) {
      const tile = document.createElement("canvas");
      const scale = Math.max(1, Math.round(this.ratio || 1));
      tile.width = tile.height = 6 * scale;
      const context = tile.getContext("2d");
      context.scale(scale, scale);
      context.fillStyle = context.strokeStyle = colour;
      context.globalAlpha = ground;
      context.fillRect(0, 0, 6, 6);
      context.globalAlpha = alpha;
      context.lineWidth = 1.3;
      if (hatch) context.stroke(new Path2D(hatch));
      const pattern = this.context.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(1 / scale));
      this.patterns.set(key, pattern);
    }
    return this.patterns.get(key);
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

// A stage's name in at most `most` characters: whole, or what tells it from others, or nothing.
function fitting(stage, most) {
  if (stage.length <= most) return stage;
  const short = stage.replace(/^compute_/, "");
  return most < 5 ? "" : short.length <= most ? short : `${short.slice(0, most - 1)}…`;
}
