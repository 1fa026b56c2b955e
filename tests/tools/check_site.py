"""Open every page of the documentation site in Chromium: python -m tests.tools.check_site SITE

At the width of a desk and of a phone, no page may be wider than its window, lack a picture, or
write an error to the console. Without Chromium (`make browser`) nothing is checked, and it says so.
"""

import contextlib
import functools
import http.server
import json
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import threading

WIDTHS = (1400, 420)
# For one page, and for all of them together.
PAGE_S, SITE_S = 20, 240
DRIVER, ANSWER = "/check-site-driver.html", "/check-site-answer"
# One browser loads every page once, two at a time, and resizes its frame. It sends what it found
# to the server: waiting for a headless browser to end by itself means waiting for its virtual
# clock, which stands still as long as any frame is loading.
SCRIPT = """<!doctype html><title>running</title><body><script>
const pages = %(pages)s, found = [], waiting = [...pages];
const after = (ms, value) => new Promise(done => setTimeout(done, ms, value));
async function look(page) {
  const frame = document.createElement("iframe");
  frame.style = `width:${%(widths)s[0]}px;height:900px;border:0`;
  const loaded = new Promise(done => frame.onload = () => done(true));
  frame.src = page;
  document.body.append(frame);
  if (!await Promise.race([loaded, after(%(page_ms)s, false)])) {
    found.push(`${page}: did not load in ${%(page_ms)s / 1000} s`);
    return frame.remove();
  }
  const root = frame.contentDocument.documentElement;
  const images = [...frame.contentDocument.images].filter(i => i.loading !== "lazy");
  await Promise.race([Promise.all(images.map(i => i.decode().catch(() => 0))), after(2000)]);
  for (const image of images) if (!image.naturalWidth) found.push(`${page}: no ${image.src}`);
  for (const width of %(widths)s) {
    frame.style.width = `${width}px`;
    await after(40);  // scripts of the page may answer to the new width
    if (root.scrollWidth > root.clientWidth)
      found.push(`${page} at ${width}: ${root.scrollWidth} pixels wide`);
  }
  frame.remove();
}
async function lane() { while (waiting.length) await look(waiting.shift()); }
Promise.all([lane(), lane()]).then(() => fetch("%(answer)s", {
  method: "POST", body: JSON.stringify({found, looked: pages.length})}));
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site and the page that looks at it, and takes its answer."""

    driver = b""
    answers: "queue.SimpleQueue[str]"

    def do_GET(self):
        if self.path != DRIVER:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        return self.wfile.write(self.driver)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.send_response(204)
        self.end_headers()
        if self.path == ANSWER:
            self.answers.put(body)

    def log_message(self, *args):
        """Say nothing."""


@contextlib.contextmanager
def served(site, driver):
    """A server of the site in the background, as its address and the queue of answers."""
    answers = queue.SimpleQueue()
    handler = type("Handler", (Handler,), {"driver": driver, "answers": answers})
    serve = functools.partial(handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", answers
        finally:
            server.shutdown()


def problems(site, chromium, limit_s=SITE_S):
    """What is wrong with the pages of a site, and how many were looked at."""
    pages = sorted(f"/{page.relative_to(site).as_posix()}" for page in site.rglob("*.html"))
    fields = {"pages": json.dumps(pages), "widths": json.dumps(WIDTHS)}
    fields |= {"page_ms": 1000 * PAGE_S, "answer": ANSWER}
    with (
        served(site, (SCRIPT % fields).encode()) as (address, answers),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
    ):
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--enable-logging=stderr", "--window-size=1500,1000", "--no-first-run"]
        # without a port for a debugger, it would end as soon as the first page is loaded
        command += ["--remote-debugging-port=0", f"--user-data-dir={profile}"]
        browser = subprocess.Popen(
            [*command, address + DRIVER], stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            answer = json.loads(answers.get(timeout=limit_s))
        except queue.Empty:
            answer = {"found": [f"the check did not end in {limit_s} s"], "looked": 0}
        finally:
            browser.kill()
            browser.wait()
        log.seek(0)
        console = [line.strip() for line in log if "CONSOLE" in line]
    return answer["found"] + console, answer["looked"]


def main(argv):
    """0 when every page is in order, or when there is no browser to see it."""
    site = pathlib.Path(argv[0])
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("check_site: no Chromium here, so the pages were not looked at")
        return 0
    found, looked = problems(site, chromium)
    print("\n".join(found) or f"check_site: {looked} pages at {WIDTHS} pixels are in order")
    return int(bool(found) or looked == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
