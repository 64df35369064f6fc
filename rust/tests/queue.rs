//! The waiting queue with very many rows: nothing it does grows with their number beyond a logarithm.

use std::time::Instant;

use specbatch_core::queue::WaitingQueue;

/// Seconds to queue `rows` rows with common beginnings, then take them out from the front.
fn seconds(rows: u32) -> f64 {
    let start = Instant::now();
    let mut queue = WaitingQueue::new(16);
    for row in 0..rows {
        let topic = (row % 37).cast_signed();
        let prompt: Vec<i32> = (0..48).map(|i| if i < 40 { topic } else { i * row.cast_signed() }).collect();
        queue.push(row, 0, prompt.into());
    }
    let mut taken = 0;
    loop {
        let first = queue.iter().next();
        let Some(row) = first else { break };
        assert!(queue.remove(row, 0));
        taken += 1;
    }
    assert_eq!(taken, rows);
    start.elapsed().as_secs_f64()
}

#[test]
fn a_hundred_thousand_rows_take_no_longer_each_than_a_few_thousand() {
    let few = (0..5).map(|_| seconds(5_000)).fold(f64::MAX, f64::min) / 5_000.0;
    let many = (0..3).map(|_| seconds(100_000)).fold(f64::MAX, f64::min) / 100_000.0;
    assert!(many < 8.0 * few, "{:.2} us a row among 100,000, {:.2} us among 5,000", many * 1e6, few * 1e6);
}
