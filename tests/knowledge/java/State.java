import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;

/** The state of a group, how many members it has and its coordinator, by an admin client that stays: see Asking. */
public class State {
    static Admin admin;

    public static void main(String[] arguments) throws Exception {
        if (admin == null) {
            admin = Admin.create(Map.of("bootstrap.servers", arguments[1], "default.api.timeout.ms", "5000", "request.timeout.ms", "4000"));
        }
        String group = arguments[2];
        try {
            ConsumerGroupDescription found = admin.describeConsumerGroups(List.of(group)).all().get().get(group);
            System.out.print(found.groupState() + " " + found.members().size() + " " + found.coordinator().id());
        } catch (java.util.concurrent.ExecutionException fault) {
            System.out.print("UNKNOWN 0 -1");
        }
    }
}
