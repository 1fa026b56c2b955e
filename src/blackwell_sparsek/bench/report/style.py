"""Style and script of the page. The script only sorts tables: without it, everything is there."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --ink: #1b1f24; --soft: #5c6570; --line: #e3e5e8; --grid: #eceef0;
  --accent: #c2410c; --accent-soft: #fff1e9; --good: #15803d; --bad: #b42318;
  --c0: #d9480f; --c1: #2f6fb5; --c2: #3f9a74; --c3: #8a63c9; --c4: #b8890b; --c5: #38a3b8;
  --c6: #c2578f; --c7: #7d8590; --c8: #6b8e23; --c9: #9c6644; --c10: #4b5fc0; --c11: #b0b7bf;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1b1f23; --ink: #e8eaed; --soft: #9aa4af; --line: #2e343a;
    --grid: #262b30; --accent: #ff8a4c; --accent-soft: #33231a; --good: #57c785; --bad: #ff8a80;
    --c0: #ff8a4c; --c1: #6aa9ec; --c2: #5fc79d; --c3: #b394f0; --c4: #e0b640; --c5: #62cfe3;
    --c6: #ec86b8; --c7: #98a2ad; --c8: #a4c659; --c9: #cf9b78; --c10: #8f9ff2; --c11: #68717a;
  }
}
* { box-sizing: border-box }
html { scroll-behavior: smooth }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
main, header > div { max-width: 1080px; margin: 0 auto; padding: 0 24px }
header { border-bottom: 1px solid var(--line); background: var(--card); padding: 32px 0 18px }
h1 { margin: 0 0 4px; font-size: 28px; letter-spacing: -.02em; line-height: 1.2 }
h2 { margin: 52px 0 2px; font-size: 21px; letter-spacing: -.01em; scroll-margin-top: 16px }
p { margin: 6px 0 }
.soft, figcaption, footer { color: var(--soft) }
nav { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 18px }
nav a { color: var(--ink); text-decoration: none; border: 1px solid var(--line);
  border-radius: 999px; padding: 3px 12px; font-size: 13px }
nav a:hover, nav a:focus-visible { border-color: var(--accent); color: var(--accent) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px;
  margin: 26px 0 0 }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px }
.card b { display: block; font-size: 24px; letter-spacing: -.02em; line-height: 1.25;
  font-variant-numeric: tabular-nums }
.card span { color: var(--soft); font-size: 13px }
figure { margin: 18px 0 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 16px 18px 12px }
figcaption { font-size: 13px; margin-bottom: 10px }
.pictures { display: flex; flex-wrap: wrap; gap: 8px 24px; overflow-x: auto }
.pictures svg { flex: 1 1 440px; min-width: 380px; max-width: 100%; height: auto; display: block }
.pictures svg:only-child { min-width: 640px }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 0 0 10px;
  padding: 0; list-style: none }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink) }
svg .tick, svg .label { fill: var(--soft); font-size: 11px }
svg .value { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums }
svg .title { font-weight: 600 }
svg .grid { stroke: var(--grid) }
svg .level { stroke: var(--soft); stroke-dasharray: 5 4 }
svg .whisker { stroke: var(--ink); stroke-width: 1.2; opacity: .55 }
svg .roof { fill: none; stroke: var(--soft); stroke-width: 2 }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round }
svg .line.c0 { stroke-width: 3 }
svg .mark { stroke: var(--card); stroke-width: 1.5 }
.scroll { overflow-x: auto; margin-top: 18px; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card) }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums }
caption { text-align: left; padding: 10px 14px 4px; color: var(--soft) }
th, td { padding: 6px 12px; text-align: right; white-space: nowrap;
  border-top: 1px solid var(--line) }
thead th { border-top: 0; color: var(--soft); font-weight: 600; background: var(--card) }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--card) }
tbody tr:hover td { background: var(--accent-soft) }
td.ours { color: var(--accent); font-weight: 600 }
td.win { color: var(--good) } td.loss { color: var(--bad) } td.none { color: var(--soft) }
th[aria-sort] { cursor: pointer; user-select: none }
th[aria-sort=ascending]::after { content: " ▲" } th[aria-sort=descending]::after { content: " ▼" }
details { margin-top: 14px; font-size: 13px }
summary { cursor: pointer; color: var(--soft) }
details ul { margin: 6px 0; padding-left: 20px } details li { overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 8px 0 }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
.warning { border-left: 3px solid var(--bad); padding-left: 12px }
footer { margin: 56px 0 40px; font-size: 13px }
@media (max-width: 600px) { main, header > div { padding: 0 14px } h1 { font-size: 23px } }
@media print { nav { display: none } figure, .scroll { break-inside: avoid } }
"""
CSS += "".join(
    f"svg .fill.c{i}, svg .mark.c{i} {{ fill: var(--c{i}) }}\n"
    f"svg .line.c{i} {{ stroke: var(--c{i}) }}\n"
    f".swatch.c{i} {{ background: var(--c{i}) }}\n"
    for i in range(12)
)

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.setAttribute("aria-sort", "none");
    head.tabIndex = 0;
    const sort = () => {
      const up = head.getAttribute("aria-sort") === "descending";
      table.querySelectorAll("thead th").forEach(h => h.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => row.cells[column].dataset.value;
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const [m, n] = [Number(x), Number(y)];
        const less = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
        return up ? less : -less;
      };
      const body = table.tBodies[0];
      [...body.rows].sort(order).forEach(row => body.append(row));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  });
}
"""
