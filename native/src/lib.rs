//! The compiled core of kproxy: it relays what needs no decision.
//!
//! A `Lane` serves all connections of one event loop. It decides nothing: it asks Python about each kind of request once,
//! and a frame that is not plain ends the turn of its connection, whose state goes to the Python session
//! (`kproxy/proxy/relay/compiled.py`).

mod conn;
mod program;
mod sockets;
mod tally;
mod turn;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[pymodule]
fn kproxy_core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<tally::Lane>()?;
    module.add_class::<tally::Program>()?;
    module.add_class::<tally::Tally>()?;
    module.add_class::<conn::Conn>()?;
    module.add_class::<conn::Side>()?;
    module.add_function(wrap_pyfunction!(is_plain, module)?)?;
    module.add_function(wrap_pyfunction!(names, module)?)?;
    Ok(())
}

/// Returns whether a response, from the byte after its correlation id on, is plain.
#[pyfunction]
fn is_plain(program: Vec<u32>, response: &[u8]) -> PyResult<bool> {
    tally::checked(&program)?;
    Ok(program::is_plain(&program, response))
}

/// Returns what a program collects from a request, from the byte after its correlation id on; None: it does not fit.
#[pyfunction]
fn names(py: Python<'_>, program: Vec<u32>, request: &[u8]) -> PyResult<Option<Py<PyBytes>>> {
    tally::checked(&program)?;
    let mut found = Vec::new();
    let fits = program::collects(&program, request, &mut found);
    Ok(fits.then(|| PyBytes::new_bound(py, &found).unbind()))
}
