// A share group (KIP-932), which Kafka has from 4.0 on: two members one after the other, each record acknowledged.

import java.time.Duration;
import java.util.Map;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class Share implements Runnable {
  @Override
  public void run() {
    for (int part = 1; part <= 2; part++) {
      Properties settings = Driver.consumer(Map.of());
      settings.remove("auto.offset.reset"); // of a share group: by the broker, see brokers.py
      settings.remove("enable.auto.commit");
      try (KafkaShareConsumer<byte[], byte[]> consumer =
          new KafkaShareConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
        consumer.subscribe(List.of(Driver.text("topic")));
        while (Driver.wants(part)) {
          for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofSeconds(1))) {
            Driver.write(part, record);
          }
          consumer.commitSync();
        }
      }
    }
  }
}
