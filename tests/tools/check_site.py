"""Open every page of the documentation site in Chromium: python -m tests.tools.check_site SITE

At the width of a desk and of a phone, no page may be wider than its window, lack a picture, or
write an error to the console. Without Chromium (`make browser`) nothing is checked, and it says so.
"""

import functools
import html
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading

WIDTHS = (1400, 420)
DRIVER = "/check-site-driver.html"
# One page loads all others into a frame, so that the browser starts only once.
SCRIPT = """<!doctype html><title>running</title><body><script>
const pages = %(pages)s, found = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const root = frame.contentDocument.documentElement;
  const images = [...frame.contentDocument.images].filter(i => i.loading !== "lazy");
  await Promise.all(images.map(i => i.decode().catch(() => 0)));
  if (root.scrollWidth > root.clientWidth)
    found.push(`${page} at ${width}: ${root.scrollWidth} pixels wide`);
  for (const image of images) if (!image.naturalWidth) found.push(`${page}: no ${image.src}`);
  frame.remove();
}
async function all() {
  // one after the other: the clock of a headless browser stands still while frames compete
  for (const width of %(widths)s) for (const page of pages) await look(page, width);
  document.body.textContent = JSON.stringify({found, looked: pages.length});
}
all();
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and the page that looks at it."""

    driver = b""

    def do_GET(self):
        if self.path != DRIVER:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        return self.wfile.write(self.driver)

    def log_message(self, *args):
        """Say nothing."""


def problems(site, chromium):
    """What is wrong with the pages of a site, and how many were looked at."""
    pages = sorted(f"/{page.relative_to(site).as_posix()}" for page in site.rglob("*.html"))
    fields = {"pages": json.dumps(pages), "widths": json.dumps(WIDTHS)}
    handler = type("Handler", (Handler,), {"driver": (SCRIPT % fields).encode()})
    serve = functools.partial(handler, directory=str(site))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server,
        tempfile.TemporaryDirectory() as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
        ]
        command += [f"--user-data-dir={profile}", "--window-size=1500,1000", "--dump-dom"]
        command += [f"--virtual-time-budget={1000 * len(pages) * len(WIDTHS)}"]
        url = f"http://127.0.0.1:{server.server_port}{DRIVER}"
        done = subprocess.run([*command, url], capture_output=True, text=True, timeout=600)
        server.shutdown()
    body = re.search(r"<body>(\{.*\})</body>", done.stdout)
    if body is None:
        return [f"the check did not finish: {done.stderr[-500:]}"], 0
    seen = json.loads(html.unescape(body[1]))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return seen["found"] + console, seen["looked"]


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
