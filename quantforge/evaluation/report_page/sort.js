// Tables sort by the column whose header is pressed: first descending, then ascending; what has no figure stays last.
for (const table of document.querySelectorAll("table")) {
  const headers = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headers.forEach((header, column) => {
    const button = header.firstElementChild;
    button.disabled = false;
    button.addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") !== "descending";
      for (const other of headers) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.key;
      const compare = (first, second) => {
        const [a, b] = [key(first), key(second)];
        if (!a || !b) return Number(!a) - Number(!b);
        const numbers = isFinite(a) && isFinite(b);
        const order = numbers ? a - b : a.localeCompare(b, "en", { numeric: true });
        return down ? -order : order;
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
