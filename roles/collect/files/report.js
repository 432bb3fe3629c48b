// Draws the page from the JSON in it. No library, no network; text is only ever set as text.
'use strict';
(() => {
  const begun = performance.now();
  const data = JSON.parse(document.getElementById('data').textContent);
  const byId = (id) => document.getElementById(id);
  const known = (value) => value !== null && value !== undefined;
  const PARTS = [
    ['forward_backward_seconds', 'forward and backward', 'var(--c0)'],
    ['wait_seconds', 'waiting for other ranks', 'var(--c1)'],
    ['optimizer_seconds', 'optimizer', 'var(--c2)'],
    ['data_seconds', 'data', 'var(--c3)'],
  ];

  // -- words --------------------------------------------------------------------------------------------------------

  const number = (value, digits) => known(value) ? value.toLocaleString('en', { maximumFractionDigits: digits, minimumFractionDigits: digits }) : '–';
  const loss = (value) => number(value, 4);
  const speed = (value) => number(value, known(value) && value < 100 ? 1 : 0);
  const share = (value) => known(value) ? `${number(100 * value, value < 0.0995 ? 1 : 0)} %` : '–';
  const bytes = (value) => {
    if (!known(value)) return '–';
    for (const [unit, size] of [['GB', 1e9], ['MB', 1e6], ['kB', 1e3]]) if (value >= size) return `${number(value / size, value < 100 * size ? 1 : 0)} ${unit}`;
    return `${number(value, 0)} B`;
  };
  const seconds = (value) => {
    if (!known(value)) return '–';
    if (value < 1) return `${number(1000 * value, value < 0.1 ? 1 : 0)} ms`;
    if (value < 60) return `${number(value, value < 10 ? 2 : 1)} s`;
    if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
    return `${Math.floor(value / 3600)} h ${Math.floor(value % 3600 / 60)} min`;
  };
  const clock = (value) => known(value) ? new Date(1000 * value).toLocaleString('sv') : '';  // Sweden writes 2026-05-04 12:00:00

  // -- elements -----------------------------------------------------------------------------------------------------

  const DRAWN = ['svg', 'line', 'path', 'circle', 'text', 'title'];
  const make = (name, attributes = {}, ...children) => {
    const element = DRAWN.includes(name) ? document.createElementNS('http://www.w3.org/2000/svg', name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children.filter(known));
    return element;
  };
  const fillTable = (table, header, rows, numbers = []) => {
    const cell = (tag, content, at) => make(tag, numbers.includes(at) ? { class: 'number' } : {}, content);
    table.append(make('thead', {}, make('tr', {}, ...header.map((text, at) => cell('th', text, at)))));
    table.append(make('tbody', {}, ...rows.map((row) => make('tr', {}, ...row.map((content, at) => cell('td', known(content) ? content : '–', at))))));
    return table;
  };
  const section = (id, title, ...children) => byId(id).append(make('h2', {}, title), ...children);
  const scroll = (table) => make('div', { class: 'scroll' }, table);

  // -- charts -------------------------------------------------------------------------------------------------------

  const rankColor = (at) => `var(--c${at % 8})`;
  const charts = [];

  const ticks = (low, high, wanted) => {
    const span = high - low || Math.abs(high) || 1;
    const raw = span / wanted;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
    return found;
  };

  // A line through the known values: of the steps in one pixel the lowest and the highest. Where steps are missing, a host was away.
  const pathOf = (one, x, y) => {
    let path = '', pen = 'M', column = [];
    const flush = () => {
      const by = [...column].sort((first, second) => one.y[first] - one.y[second]);
      for (const at of column.filter((each) => each === by[0] || each === by[by.length - 1])) {
        path += `${pen}${x(one.x[at]).toFixed(1)} ${y(one.y[at]).toFixed(1)}`;
        pen = 'L';
      }
      column = [];
    };
    one.x.forEach((step, at) => {
      const ends = !known(one.y[at]) || (at && step - one.x[at - 1] > (one.gap || Infinity));
      if (ends || (column.length && Math.floor(x(step)) !== Math.floor(x(one.x[column[0]])))) flush();
      if (ends) pen = 'M';
      if (known(one.y[at])) column.push(at);
    });
    flush();
    return path;
  };

  const extent = (lists) => {
    let low = Infinity, high = -Infinity;
    for (const list of lists) for (const value of list) if (known(value)) { if (value < low) low = value; if (value > high) high = value; }
    return low <= high ? [low, high] : null;
  };

  // series: {name, color, x, y, thin, dots, gap}, gap: the longest distance between neighbours.
  const chart = (title, note, series, options = {}) => {
    const drawn = series.filter((one) => one.x.length && one.y.some(known));
    if (!drawn.length) return;
    const figure = make('figure', { class: options.wide ? 'wide' : '', 'data-chart': title }, make('h3', {}, title), make('p', { class: 'quiet' }, note));
    const legend = make('div', { class: 'legend' });
    for (const one of drawn) {
      if (one.name) legend.append(make('span', {}, make('i', { style: `background:${one.color};opacity:${one.thin ? 0.45 : 1}` }), one.name));
    }
    if (legend.children.length) figure.append(legend);
    const svg = make('svg', { role: 'img', 'aria-label': title });
    figure.append(svg);
    byId(options.more ? 'more' : 'charts').append(figure);
    charts.push({ svg, series: drawn, options });
  };

  const paint = ({ svg, series, options }) => {
    const width = svg.clientWidth || 320, height = options.height || 220;
    const box = { left: 52, right: 18, top: 22, bottom: 36 };
    const inner = width - box.left - box.right;
    svg.replaceChildren();
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    svg.setAttribute('height', height);
    const across = extent(series.map((one) => one.x));
    let [low, high] = extent(series.map((one) => one.y));
    if (options.zero) { low = Math.min(0, low); high += (high - low) * 0.06; }
    // Values that differ by rounding only are one value.
    if (high - low <= 1e-9 * Math.abs(high)) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
    const x = (value) => box.left + (across[1] === across[0] ? inner / 2 : inner * (value - across[0]) / (across[1] - across[0]));
    const y = (value) => box.top + (height - box.top - box.bottom) * (1 - (value - low) / (high - low));
    for (const value of ticks(low, high, 4)) {
      svg.append(make('line', { class: 'grid', x1: box.left, x2: width - box.right, y1: y(value), y2: y(value) }));
      svg.append(make('text', { x: box.left - 6, y: y(value) + 4, 'text-anchor': 'end' }, (options.tick || options.show)(value)));
    }
    for (const value of ticks(across[0], across[1], Math.max(2, Math.floor(inner / 75))).filter(Number.isInteger)) {
      svg.append(make('text', { x: x(value), y: height - 20, 'text-anchor': 'middle' }, number(value, 0)));
    }
    svg.append(make('text', { x: box.left + inner / 2, y: height - 5, 'text-anchor': 'middle' }, 'step'), make('text', { x: 2, y: 12 }, options.unit));
    for (const mark of options.marks || []) {
      if (mark.step < across[0] || mark.step > across[1]) continue;
      const line = make('line', { class: `mark ${mark.kind}`, x1: x(mark.step), x2: x(mark.step), y1: box.top, y2: height - box.bottom });
      line.append(make('title', {}, mark.text));
      svg.append(line);
    }
    for (const one of series) {
      svg.append(make('path', { 'data-series': one.name || '', 'data-points': one.x.length, fill: 'none', stroke: one.color, 'stroke-width': one.thin ? 1 : 1.8, 'stroke-linejoin': 'round', opacity: one.thin ? 0.45 : 1, d: pathOf(one, x, y) }));
      if (one.dots || one.x.length === 1) {
        one.x.forEach((value, at) => known(one.y[at]) && svg.append(make('circle', { cx: x(value), cy: y(one.y[at]), r: 3, fill: one.color })));
      }
    }
    hover(svg, series, options, x, box, width, height, across);
  };

  const hover = (svg, series, options, x, box, width, height, across) => {
    const cross = make('line', { class: 'cross', y1: box.top, y2: height - box.bottom, visibility: 'hidden' });
    svg.append(cross);
    const tip = byId('tip');
    svg.onpointermove = (event) => {
      const rectangle = svg.getBoundingClientRect();
      const part = (event.clientX - rectangle.left - box.left) / (width - box.left - box.right);
      const wanted = across[0] + Math.max(0, Math.min(1, part)) * (across[1] - across[0]);
      const step = series[0].x.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
      cross.setAttribute('x1', x(step));
      cross.setAttribute('x2', x(step));
      cross.setAttribute('visibility', 'visible');
      tip.replaceChildren(make('b', {}, `step ${number(step, 0)}`));
      for (const one of series) {
        const value = one.y[one.x.indexOf(step)];
        if (known(value)) tip.append(make('div', {}, `${one.name ? `${one.name}: ` : ''}${options.show(value)}`));
      }
      tip.hidden = false;
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    };
    svg.onpointerleave = () => { tip.hidden = true; cross.setAttribute('visibility', 'hidden'); };
  };

  // -- what is drawn ------------------------------------------------------------------------------------------------

  // The mean of each step and its neighbours on both sides: unlike a trailing mean it does not lag behind a falling loss.
  const smooth = (values) => {
    const reach = Math.max(2, Math.round(values.length / 30)), sums = [0], counts = [0];
    values.forEach((value, at) => { sums.push(sums[at] + (known(value) ? value : 0)); counts.push(counts[at] + (known(value) ? 1 : 0)); });
    return values.map((value, at) => {
      const from = Math.max(0, at - reach), to = Math.min(values.length, at + reach + 1);
      return known(value) ? (sums[to] - sums[from]) / (counts[to] - counts[from]) : null;
    });
  };

  const lead = data.ranks[0];
  const several = data.ranks.length > 1;
  const hostName = (rank) => `rank ${rank.summary.rank}, ${rank.summary.host}`;
  const perRank = (key, map = (value) => value) => data.ranks.filter((rank) => rank.columns[key]).map((rank) => ({
    name: hostName(rank), color: rankColor(data.ranks.indexOf(rank)), x: rank.columns.step, y: rank.columns[key].map((value, at) => known(value) ? map(value, rank, at) : null), gap: 1,
  }));
  const smoothed = (table, key, name, color) => ({ name: `${name ? `${name}, ` : ''}smoothed`, color, x: table.step, y: smooth(table[key]) });

  // All steps of the run, whichever ranks made them.
  const steps = new Map([...data.ranks].reverse().flatMap(({ columns }) => columns.step.map((step, at) => [step, [columns.loss, columns.tokens_per_second].map((values) => values ? values[at] : null)])));
  const table = { step: [...steps.keys()].sort((one, other) => one - other) };
  ['loss', 'tokens_per_second'].forEach((key, at) => { table[key] = table.step.map((step) => steps.get(step)[at]); });

  const drawCharts = () => {
    const saves = lead.checkpoints.length > 20 ? [] : lead.checkpoints.map((one) => ({ step: one.step, kind: 'save', text: `step ${one.step}: checkpoint` }));
    const events = data.happenings.filter((one) => known(one.step) && one.kind).filter((one) => one.host === lead.summary.host || one.kind === 'error').map((one) => ({ step: one.step, kind: one.kind, text: `step ${one.step}, ${one.host}: ${one.text}` }));
    const marks = [...saves, ...events];
    const others = (key) => data.others.filter((other) => other.columns[key]).map((other, at) => smoothed(other.columns, key, other.run, rankColor(at + 2)));
    const each = (key) => table[key].some(known) ? [{ name: 'each step', color: 'var(--c0)', x: table.step, y: table[key], thin: true }, smoothed(table, key, data.others.length ? data.run : '', 'var(--c0)'), ...others(key)] : [];
    chart('Loss', 'Mean over all ranks. Upright lines: red where a rank ended by an error, dashed where the ranks were started again, pale for checkpoints.', each('loss'), { show: loss, tick: (value) => number(value, 2), unit: 'loss', marks, wide: true, height: 280 });
    const evals = [[data.run, lead.evals, 0], ...data.others.map((other, at) => [other.run, other.evals, at + 2])];
    chart('Validation', 'Bits per byte of text, or of answers, that is not trained on; lower is better.', evals.map(([name, list, color]) => ({
      name: evals.length > 1 ? name : '', color: rankColor(color), x: list.map((one) => one.step), y: list.map((one) => one.val_bpb), dots: list.length < 60,
    })), { show: loss, tick: (value) => number(value, 2), unit: 'bits per byte' });
    chart('Speed', 'Tokens per second of all ranks together.', each('tokens_per_second'), { show: speed, unit: 'tokens per second', zero: true });
    chart('Waiting', 'Share of each step that a rank waited for the others. The one that waits least is the slow one.', perRank('wait_seconds', (value, rank, at) => rank.columns.seconds && rank.columns.seconds[at] ? value / rank.columns.seconds[at] : null), { show: share, unit: 'share of the step', zero: true });
    for (const rank of data.ranks) {
      const parts = PARTS.filter(([key]) => rank.columns[key]).map(([key, name, color]) => ({ name, color, x: rank.columns.step, y: smooth(rank.columns[key]), gap: 1 }));
      chart(`Where the time of ${hostName(rank)} went`, 'Seconds of a step, smoothed.', parts, { show: seconds, unit: 'seconds', zero: true, more: true });
    }
    if (data.ranks.some((rank) => new Set(rank.columns.rows).size > 1)) chart('Rows', 'Rows of a step that each rank took; they follow the speeds of the hosts.', perRank('rows'), { show: (value) => number(value, 0), unit: 'rows', zero: true, more: true });
    chart('Sent', 'Bytes that a rank sent in a step.', perRank('bytes_sent'), { show: bytes, unit: 'bytes', zero: true, more: true });
    chart('Memory', 'Resident memory of a rank.', perRank('memory_bytes'), { show: bytes, unit: 'bytes', zero: true, more: true });
  };

  // One band for each host: when it trained, waited, or was away and why.
  const drawBands = () => {
    const spans = data.hosts.flatMap((host) => [...host.trained, ...host.gaps]);
    if (!spans.length) return;
    const [from, to] = extent(spans.map((span) => span.slice(0, 2)));
    const part = (seconds) => `${(100 * seconds / (to - from || 1)).toFixed(3)}%`;
    const piece = (kind, [begun, ended, why]) => make('i', { class: kind, style: `left:${part(begun - from)};width:${part(ended - begun)}`, title: `${why || kind}: ${clock(begun)} to ${clock(ended)}` });
    section('hosts', 'Hosts over time', ...data.hosts.map((host) => make('div', { class: 'band' }, make('span', {}, host.host), make('div', { class: 'track' },
      ...host.trained.map((span) => piece('trained', span)), ...host.gaps.map((gap) => piece(gap[2] ? 'away' : 'waiting', gap))))),
    make('div', { class: 'band quiet' }, make('span'), make('div', { class: 'ends' }, make('span', {}, clock(from)), make('span', {}, clock(to)))),
    make('div', { class: 'legend' }, ...['trained', 'waiting', 'away'].map((kind) => make('span', {}, make('i', { class: kind }), kind))));
  };

  const tile = (label, value, kind = '') => byId('tiles').append(make('div', { class: 'tile' }, make('b', { class: kind }, value), make('span', {}, label)));

  const continuation = ({ prompt, text }) => prompt && text && text.startsWith(prompt) ? text.slice(prompt.length) : text || '';

  const drawWords = () => {
    const one = lead.summary;
    byId('title').textContent = `Run ${data.run}`;
    const lasted = known(data.began) && known(data.as_of) ? `${clock(data.began)} to ${clock(data.as_of)}, ${seconds(data.as_of - data.began)}` : '';
    byId('subtitle').textContent = [data.model, data.data && `data ${data.data}`, `on ${data.hosts.map((host) => host.host).join(', ')}`, lasted].filter(Boolean).join(' · ');
    tile('steps made', known(one.steps) ? `${number(one.done, 0)} of ${number(one.steps, 0)}` : number(one.done, 0));
    tile(`loss, smoothed, from ${loss(one.first_loss)}`, loss(smooth(table.loss).filter(known).pop()));
    if (known(one.val_bpb)) tile('validation, bits per byte', loss(one.val_bpb));
    tile('tokens per second', speed(one.tokens_per_second_mean));
    if (several) {
      tile('waited for other ranks', data.ranks.map((rank) => share(rank.summary.wait_share)).slice(0, 4).join(' / '));
      tile('weights identical on all ranks', ...({ true: ['yes', 'good'], false: ['NO', 'bad'] }[data.identical] || ['not compared']));
    }
    byId('sentences').append(...data.sentences.map((text) => make('p', {}, text)));
    byId('notices').append(...data.notices.map((text) => make('div', { class: 'notice' }, text)));
    fillTable(byId('ranks'), ['rank', 'host', 'end', 'steps', 'rows', 'first loss', 'last loss', 'tok/s', 'waited', 'sent a step', 'memory'], data.ranks.map(({ summary }) => [
      String(summary.rank), summary.host, summary.end, known(summary.steps) ? `${summary.done}/${summary.steps}` : String(summary.done), number(summary.rows, 0), loss(summary.first_loss), loss(summary.loss), speed(summary.tokens_per_second_mean),
      `${seconds(summary.wait_seconds)} (${share(summary.wait_share)})`, bytes(summary.bytes_sent), bytes(summary.memory_bytes),
    ]), [3, 4, 5, 6, 7, 8, 9, 10]);
    const samples = data.ranks.flatMap((rank) => rank.samples);
    const prompts = [...new Set(samples.map((sample) => sample.prompt || ''))].map((prompt) => samples.filter((sample) => (sample.prompt || '') === prompt));
    if (samples.length) section('samples', 'Samples, first and last', ...prompts.map((same) => make('div', { class: 'pair' }, ...[...new Set([same[0], same[same.length - 1]])].map((sample) => make('div', {}, make('p', { class: 'quiet' }, `step ${number(sample.step, 0)}`), make('blockquote', {}, make('b', {}, sample.prompt || ''), continuation(sample)))))));
    if (data.others.length) {
      const rows = [{ run: data.run, digest: data.digest, summary: one }, ...data.others];
      section('comparison', 'Compared with other runs', scroll(fillTable(make('table'), ['run', 'plan', 'steps', 'first loss', 'last loss', 'val bpb', 'tok/s', 'end'], rows.map(({ run, digest, summary }) => [run, digest, String(summary.done), loss(summary.first_loss), loss(summary.loss), loss(summary.val_bpb), speed(summary.tokens_per_second_mean), summary.end]), [2, 3, 4, 5, 6])));
    }
    if (data.compared) section('predicted', 'Predicted and measured', make('pre', {}, data.compared));
    if (data.happenings.length) {
      section('happenings', 'What happened', scroll(fillTable(make('table'), ['time', 'step', 'host', 'what'], data.happenings.map((event) => [clock(event.time), known(event.step) ? number(event.step, 0) : '', event.host || '', make('span', { class: event.severity }, event.text)]), [1])));
    }
    for (const rank of data.ranks.filter((rank) => rank.lines.length)) section('lines', `Last lines of ${rank.summary.host}`, make('pre', {}, rank.lines.join('\n')));
    byId('plan').append(make('details', {}, make('summary', {}, `The plan (${data.digest})`), make('pre', {}, data.plan)));
  };

  drawWords();
  drawBands();
  drawCharts();
  const paintAll = () => charts.forEach(paint);
  paintAll();
  // What is folded has no width.
  byId('more').parentElement.hidden = !byId('more').children.length;
  byId('more').parentElement.addEventListener('toggle', paintAll);
  let width = innerWidth;
  addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; paintAll(); } });
  // Of a run that goes on, `collect` writes this page anew.
  if (data.running) setTimeout(() => location.reload(), 60000);
  document.documentElement.dataset.drawn = (performance.now() - begun).toFixed(1);
})();
