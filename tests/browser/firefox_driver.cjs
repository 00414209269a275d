// Drives Firefox for test_firefox.py: reads one command a line from stdin, [page, name, ...arguments], writes one answer a line.
// usage: NODE_PATH=... node firefox_driver.cjs FIREFOX
const readline = require("node:readline");
const puppeteer = require("puppeteer-core");

const WAIT_MS = 30_000;
const pages = new Map();
const problems = [];
let browser, context;
// Fewer processes and no animations: a page takes a fifth less of the processor.
const PREFERENCES = {
  "fission.autostart": false,
  "dom.ipc.processCount": 1,
  "dom.ipc.processPrelaunch.enabled": false,
  "toolkit.cosmeticAnimations.enabled": false,
  "ui.prefersReducedMotion": 1,
};

// Elements of a selector in which :has-text('…') may stand, as in Playwright.
const FIND = `(selector) => {
  const parts = selector.split(/:has-text\\('([^']*)'\\)/);
  let found = [document];
  for (let at = 0; at < parts.length; at += 2) {
    if (at > 0) found = found.filter((one) => one.textContent.replace(/\\s+/g, " ").includes(parts[at - 1]));
    if (parts[at]) found = found.flatMap((one) => [...one.querySelectorAll(at ? ":scope" + parts[at] : parts[at])]);
  }
  return found;
}`;
const SHOWN = "(one) => one.checkVisibility({ visibilityProperty: true }) && one.getClientRects().length > 0";

async function element(page, selector) {
  await page.waitForFunction(`(${FIND})(${JSON.stringify(selector)}).some(${SHOWN})`, { timeout: WAIT_MS });
  return (await page.evaluateHandle(`(${FIND})(${JSON.stringify(selector)}).find(${SHOWN})`)).asElement();
}

const commands = {
  async goto(page, url) { await page.goto(url, { waitUntil: "load" }); },
  async reload(page) { await page.reload({ waitUntil: "load" }); },
  async close(page) { await page.close(); },
  // Not by the pointer: an element that is still moving would be missed.
  async click(page, selector) { await (await element(page, selector)).evaluate((one) => one.click()); },
  async fill(page, selector, text) {
    await (await element(page, selector)).evaluate((one, value) => {
      one.focus();
      one.value = value;
      one.dispatchEvent(new Event("input", { bubbles: true }));
    }, text);
  },
  async press(page, key) { await page.keyboard.press(key); },
  async texts(page, selector) { return page.evaluate(`(${FIND})(${JSON.stringify(selector)}).map((one) => one.innerText)`); },
  async contents(page, selector) { return page.evaluate(`(${FIND})(${JSON.stringify(selector)}).map((one) => one.textContent)`); },
  async evaluate(page, source) { return page.evaluate(source); },
  async wait_for_selector(page, selector, state) {
    const found = `(${FIND})(${JSON.stringify(selector)})`;
    const condition = state === "hidden" ? `!${found}.some(${SHOWN})` : `${found}.some(${SHOWN})`;
    try {
      await page.waitForFunction(condition, { timeout: WAIT_MS });
    } catch (error) {
      const shown = await page.evaluate("[document.body.className, document.body.innerText.replace(/^.+(?=.{1500}$)/s, '… ')].join(': ')");
      throw new Error(`${error}; console: ${problems.join(" / ") || "nothing"}; the page shows at its end ${shown}`);
    }
  },
};

async function run([name, command, ...args]) {
  if (command === "problems") return problems.splice(0);
  if (command === "new_context") {
    await context?.close();
    context = await browser.createBrowserContext();
    pages.clear();
    return null;
  }
  if (command === "new_page") {
    const page = await context.newPage();
    page.on("pageerror", (error) => problems.push(String(error)));
    page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
    pages.set(name, page);
    return null;
  }
  return (await commands[command](pages.get(name), ...args)) ?? null;
}

async function main(executablePath) {
  browser = await puppeteer.launch({ browser: "firefox", executablePath, headless: true, extraPrefsFirefox: PREFERENCES });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    let answer;
    try {
      const late = new Promise((_, reject) => setTimeout(() => reject(new Error("no end after a minute")), 2 * WAIT_MS).unref());
      answer = { value: await Promise.race([run(JSON.parse(line)), late]) };
    } catch (error) {
      answer = { error: String(error) };
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
  await browser.close();
}

main(process.argv[2]);
